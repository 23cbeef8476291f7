"""Which files travel."""
