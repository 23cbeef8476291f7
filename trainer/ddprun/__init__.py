"""The node agent: brings up one node's ranks, supervises them, and leaves no process behind."""
