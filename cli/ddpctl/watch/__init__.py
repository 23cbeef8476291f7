"""What the nodes of a run report, as values for top, timeline and report. Knows no terminal and no page."""
