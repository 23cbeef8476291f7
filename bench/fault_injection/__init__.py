"""A training on machines out of network namespaces, harmed on purpose: what happens, and whether it is as promised."""
