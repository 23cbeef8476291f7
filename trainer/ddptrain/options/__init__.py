"""The command line of ddptrain. Knows nothing of torch, so that ``--help`` is instant.

A room's options are a frozen group in a file here, named after the room; ``command`` makes one parser of all groups.
A field of a group carries its help, its range, its default, and whether it shapes the weights.
"""

from ddptrain.options.command import Options, parse, shaping

__all__ = ["Options", "parse", "shaping"]
