"""The target ``ssh``: each node is a container or a process on a machine (host) that ddpctl reaches over SSH.

All hosts are queried in parallel. A run does not need ddpctl after its start. Any machine that has the run's record can
query and stop the run.
"""
