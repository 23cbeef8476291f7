"""Checks of machines and of the network between them. A check runs like a training script, the same on every rank.

``python -m ddpcheck bench`` measures the collectives and the links. ``ddpctl bench`` launches it on any target.
"""
