"""Writes a run as one HTML file that can be mailed: it has no script and fetches nothing. Pure: values in, text out."""
