"""The words that ddpctl, ddprun and ddptrain share: variables, exit codes, metrics, files.

All three programs import this package; it imports none of them. Standard library only, but for ``vote`` and ``series``:
they are what a rank does in its own process, with the torch and the prometheus_client that it has.
"""
