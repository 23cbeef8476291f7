"""Faults in a training on machines made of network namespaces, and whether the training recovers as it should."""
