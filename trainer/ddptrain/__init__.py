"""The trainer: one rank of one DDP training."""
