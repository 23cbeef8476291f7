"""The target ``slurm``: a batch script that Slurm runs, and the verbs that ask Slurm about it.

``options`` what a person may set · ``script`` the batch script, from ``directives`` (its #SBATCH lines), ``runtimes``
and ``engines`` (what a node starts; ``pieces`` is what they share) and ``requeue`` (its end) · ``states`` Slurm's words
in ours · ``questions`` what is asked on the login node and ``answers`` what that says · ``places`` where things are ·
``looks`` what is looked at first · ``sending`` how a job gets there · ``target`` the verbs.
Touches nothing, as every target.
"""

from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

__all__ = ["SlurmOptions", "SlurmTarget"]
