"""The names and formats that ddpctl, ddprun and ddptrain share: variables, exit codes, metrics, files.

All three programs import this package, and it imports none of them. It uses only the standard library. The exceptions
are ``vote`` (torch), ``series`` (prometheus_client) and ``object_store`` (fsspec), which run in a rank's process.
"""
