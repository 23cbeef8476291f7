"""The target ``kaggle``: a run is a version of a private notebook, pushed and asked by the official client.

A session there has one node, two GPUs and 12 hours; what it writes to its working folder is its output.
"""

from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import KaggleTarget

__all__ = ["KaggleOptions", "KaggleTarget"]
