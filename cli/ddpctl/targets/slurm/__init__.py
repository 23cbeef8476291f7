"""The target ``slurm``: a run is a job or a job array, which executes a batch script that ddpctl renders."""
