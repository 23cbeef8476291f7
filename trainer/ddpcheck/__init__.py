"""Checks of machines and of the network between them, as scripts of an ordinary run: every rank runs the same check.

``python -m ddpcheck bench`` measures the collectives and the links. ``ddpctl bench`` launches it on any target.
"""
