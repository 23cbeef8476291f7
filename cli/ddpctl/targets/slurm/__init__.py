"""The target ``slurm``: a batch script that Slurm runs, and the verbs that query Slurm about it. Runs nothing itself.

The modules: ``options``: what a user may set · ``batch_script``: its #SBATCH lines, its body and its requeue ·
``containers``: what a node starts with each runtime · ``queue``: queries for the login node, and what the answers mean
· ``target``: the verbs.
"""

from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

__all__ = ["SlurmOptions", "SlurmTarget"]
