"""Checks of machines and of the network between them, run like a training script: every rank runs the same check.

``python -m ddpcheck bench`` measures the collectives and the links. ``ddpctl bench`` launches it on any target.
"""
