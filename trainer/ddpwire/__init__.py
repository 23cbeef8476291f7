"""The names and formats that ddpctl, ddprun and ddptrain share: variables, exit codes, metrics, files.

All three programs import this package; it imports none of them. It uses only the standard library, except for ``vote``
and ``series``, which run in a rank's process and use the torch and the prometheus_client that are installed there.
"""
