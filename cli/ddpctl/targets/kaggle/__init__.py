"""The target ``kaggle``: a run is a version of a private notebook, which Kaggle's own client pushes and queries.

A Kaggle session has one node with two GPUs, and lasts at most 12 hours. The files in its working folder are its output.
"""
