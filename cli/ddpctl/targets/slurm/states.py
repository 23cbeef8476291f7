"""Slurm's words for a job's state, in ours. One table, for all that squeue, scontrol and sacct say (22.05 to 25.05)."""

from ddpctl.run import State

STATES: dict[str, State] = {
    "BOOT_FAIL": "failed",  # its node did not boot
    "CANCELLED": "stopped",
    "COMPLETED": "succeeded",
    "COMPLETING": "stopping",
    "CONFIGURING": "starting",  # its nodes boot
    "DEADLINE": "failed",
    "EXPEDITING": "pending",
    "FAILED": "failed",
    "LAUNCH_FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PENDING": "pending",
    "POWER_UP_NODE": "starting",
    "PREEMPTED": "stopped",
    "RECONFIG_FAIL": "failed",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "RESIZING": "training",
    "RESV_DEL_HOLD": "pending",
    "REVOKED": "failed",  # another cluster of the federation has it
    "RUNNING": "training",
    "SIGNALING": "training",
    "SPECIAL_EXIT": "pending",  # requeued and held
    "STAGE_OUT": "stopping",
    "STOPPED": "training",  # by SIGSTOP; it keeps its cores
    "SUSPENDED": "training",
    "TIMEOUT": "failed",
    "UPDATE_DB": "stopping",
}


def state_of(word: str) -> State:
    """The state that Slurm's ``word`` says: ``CANCELLED by 1000`` and ``CANCELLED+`` are CANCELLED."""
    return STATES.get(word.split(" ")[0].rstrip("+"), "unknown")


# Why a job that waits may wait for ever (squeue's reasons), and what to do.
HOPELESS = {
    "PartitionNodeLimit": "it asks for more nodes than its partition may give: ask for fewer, or another partition",
    "PartitionTimeLimit": "it asks for more time than its partition gives: a shorter time_limit, or another partition",
    "PartitionConfig": "its partition cannot run it as it is asked for",
    "BadConstraints": "no node has what it asks for",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "DependencyNeverSatisfied": "the run that it was to follow did not succeed: ddpctl stop it",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "AssocGrpGRES": "its account may not use so many GPUs",
    "QOSMaxGRESPerJob": "its quality of service does not give a job so many GPUs",
    "QOSMaxNodePerJobLimit": "its quality of service does not give a job so many nodes",
}
