"""Checks of machines and of the network between them. A check runs on every rank, like a training script."""
