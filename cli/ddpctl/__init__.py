"""The launcher: starts the nodes of a job on machines, and reports what happens to them. Never imports torch."""
