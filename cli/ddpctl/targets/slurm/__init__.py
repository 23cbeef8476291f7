"""The target ``slurm``: a run is a job or a job array, which executes a batch script that ddpctl renders."""

from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

__all__ = ["SlurmOptions", "SlurmTarget"]
