"""The node agent: brings up one node's ranks, watches them, and leaves nothing behind."""
