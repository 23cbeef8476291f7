"""The target ``kaggle``: a run is a version of a private notebook. The official client pushes and queries it.

A session there has one node, two GPUs and 12 hours; the files in its working folder are its output.
"""

from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import KaggleTarget

__all__ = ["KaggleOptions", "KaggleTarget"]
