"""Flags, and the variables of launchers."""
