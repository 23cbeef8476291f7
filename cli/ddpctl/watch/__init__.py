"""Reads the metrics, histories and events of a run's nodes, and computes the values for top, timeline and report."""
