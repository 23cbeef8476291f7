"""Turns what the nodes of a run report into values for top, timeline and report. This package prints nothing."""
