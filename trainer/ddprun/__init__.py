"""The node agent: it starts and supervises the ranks of one node. When it ends, none of their processes is left."""
