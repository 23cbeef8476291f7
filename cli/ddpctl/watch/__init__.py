"""Looks at a run: what its nodes told, as values for top, timeline and report. It knows no terminal and no page."""
