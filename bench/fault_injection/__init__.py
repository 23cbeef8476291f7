"""Injects faults into a training on machines made of network namespaces, and checks whether the training recovers."""
