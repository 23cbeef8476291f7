"""The target ``ssh``: a node is a container, or a process, on a machine with an SSH key. A target touches nothing.

Every verb asks all hosts at once. What a run needs stands in its folder on the host, so that any machine with the run's
record can find it; nothing there depends on this ddpctl after the start.
"""

from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.target import SshTarget

__all__ = ["SshHost", "SshOptions", "SshTarget"]
