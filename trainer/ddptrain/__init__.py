"""The trainer: one rank of one DDP training.

``python -m ddptrain`` reads its place in the world from the environment that ddprun or torchrun gives a rank, and
knows nothing of nodes, launchers or clusters.
"""
