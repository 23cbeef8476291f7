"""What is asked for: ddpctl.yaml, flags, and what becomes of them."""
