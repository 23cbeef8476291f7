"""The HTML report of a run, its plots, and the templates of HTML."""
