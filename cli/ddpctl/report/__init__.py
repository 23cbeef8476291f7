"""Writes a report about a run as one HTML file. The file has no script and loads no other file."""
