"""Records and states of runs."""
