"""Hangs, and file systems that do not answer."""
