"""The target ``ssh``: a node is a container or a process on a machine that ddpctl reaches with an SSH key.

Every verb queries all hosts at once. A run's folder on the host contains everything that the run needs, so that any
machine with the run's record can find it. After the start, nothing on the host depends on this ddpctl.
"""

from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.target import SshTarget

__all__ = ["SshHost", "SshOptions", "SshTarget"]
