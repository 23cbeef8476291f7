"""Turns a file of another launcher into a ddpctl.yaml that says what became of each of its settings."""
