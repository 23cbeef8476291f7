"""Writes a run as one HTML file that can be mailed. The file has no script and fetches nothing. Pure."""
