"""The command-line verbs: one file for each group of verbs."""
