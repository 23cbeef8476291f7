"""The launcher: places a job's nodes on machines, and says what became of them. Never imports torch."""
