"""What runs in a rank's process beside its script: steps and heartbeats, signals, the vote, metrics, the object store.

A script imports it as ``ddpwire.script``. It uses the standard library and ddpwire; ``vote`` (torch), ``series``
(prometheus_client) and ``object_store`` (fsspec) import what their rank has.
"""
