"""The target ``slurm``: a batch script that Slurm runs, and the verbs that ask Slurm about it. Performs nothing.

``options`` what a user may set · ``batch_script`` its #SBATCH lines, its body, its requeue · ``containers`` what a node
starts, for each runtime · ``queue`` the queries for the login node, and what their answers mean · ``target`` the verbs.
"""

from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

__all__ = ["SlurmOptions", "SlurmTarget"]
