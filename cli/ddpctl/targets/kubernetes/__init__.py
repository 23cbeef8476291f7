"""The target ``kubernetes``: a run is a PyTorchJob, a TrainJob or an Indexed Job, and each of its nodes is a pod.

All commands are run with the user's own kubectl.
"""
