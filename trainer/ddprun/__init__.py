"""The node agent: it starts the ranks of one node, supervises them, and leaves no process behind."""
