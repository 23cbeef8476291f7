"""The launcher: places a job's nodes on machines and reports what became of them. Never imports torch."""
