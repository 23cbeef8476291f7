"""The run's folder."""
