"""The trainer: one rank of one DDP training.

``python -m ddptrain`` reads its rank and the world size from the environment set by ddprun or torchrun. It does not
depend on nodes, launchers or clusters.
"""
