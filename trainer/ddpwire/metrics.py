"""The catalogue: every metric that ddprun and ddptrain export, from which code, docs and tests are made.

Names follow Prometheus' rules (https://prometheus.io/docs/practices/naming/): one prefix, base units, ``_total`` on
counters, and the values of every label known in advance.
"""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
# A rank has 80 series at the most. Few buckets tell a jam from a step; the mean is exact, from _sum and _count.
STEP_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 60.0)
CHECKPOINT_BUCKETS = (0.1, 1.0, 10.0, 100.0)
STEP_PHASES = ("data", "h2d", "forward", "backward", "comm_exposed", "optimizer", "other")
JOB_STATES = ("rendezvous", "training", "restarting", "stopping", "succeeded", "failed")
PREFLIGHT_STEPS = ("resolve", "address", "port", "reach", "limits", "compare", "clock", "meet")
EXIT_CAUSES = ("ok", "error", "sigkill", "sigterm", "sigsegv", "sigabrt", "oom", "hang_killed", "stopped", "other")
RESTART_REASONS = ("killed", "oom", "hang", "node_lost", "error", "stopped", "requeue")
RECOVERY_PHASES = ("detect", "teardown", "rendezvous", "start", "total", "first_step")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``labels`` maps a label to its values; an empty tuple is a label whose value is free text,
    set once a process (a version, a run's id, a device's number).
    """

    name: str
    kind: Kind
    help: str
    set_by: Literal["ddprun", "ddptrain"]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    needs_gpu: bool = False  # there only where there is one
    by_rank_0: bool = False  # the same on all ranks; only rank 0 exports it
    at_first: bool = True  # False: there is no sample before something has happened


# ---- What a rank exports: ddptrain all of it, a script by ddpwire.script a part. The node's exporter adds the label
# ``rank``, which a rank's process does not set.

UNPRODUCTIVE_CAUSES = (
    "startup",  # of the rank's process, until its first step
    "rendezvous",  # of the nodes, from their start, or from the end of the failed ranks
    "restore",  # reading a checkpoint
    "recompute",  # steps that had been taken before a failure
    "checkpoint",  # in which the loop waited for one
    "evaluation",
    "hang",  # from the last heartbeat of ranks that hung to their end
    "restart",  # the same of ranks that were lost otherwise
    "requeue",  # from the last word of a start of the run to the next start
)
STEPS = Metric(name="ddp_steps_total", kind="counter", help="Optimizer steps taken.", set_by="ddptrain")
SAMPLES = Metric(
    name="ddp_samples_total",
    kind="counter",
    help="Training samples that this rank has seen.",
    set_by="ddptrain",
)
LAST_STEP = Metric(name="ddp_last_step", kind="gauge", help="The number of the last optimizer step.", set_by="ddptrain")
LAST_STEP_TIME = Metric(
    name="ddp_last_step_timestamp_seconds",
    kind="gauge",
    help="When the last optimizer step ended, in seconds since the epoch.",
    set_by="ddptrain",
)
STEP_DURATION = Metric(
    name="ddp_step_duration_seconds",
    kind="histogram",
    help="Time of an optimizer step: by the clock on a CPU, by the GPU's own events on a GPU.",
    set_by="ddptrain",
    buckets=STEP_BUCKETS,
)
STEP_PHASE = Metric(
    name="ddp_step_phase_seconds_total",
    kind="counter",
    help="Seconds of the steps by what was done; comm_exposed: waiting for the other ranks' gradients.",
    set_by="ddptrain",
    labels={"phase": STEP_PHASES},
)
COMM = Metric(
    name="ddp_comm_seconds_total",
    kind="counter",
    help="Seconds in which gradients travelled; hidden: beside the backward pass (DDP's own average, sampled), "
    "exposed: after it, as in comm_exposed.",
    set_by="ddptrain",
    labels={"overlap": ("hidden", "exposed")},
)
MODEL_FLOPS = Metric(
    name="ddp_model_flops_total",
    kind="counter",
    help="Floating-point operations that the model's steps took here: 3 times those of a forward pass, counted once.",
    set_by="ddptrain",
)
PRODUCTIVE = Metric(
    name="ddp_productive_seconds_total",
    kind="counter",
    help="Seconds in which steps were taken that none had taken before; of all starts of the run.",
    set_by="ddptrain",
)
UNPRODUCTIVE = Metric(
    name="ddp_unproductive_seconds_total",
    kind="counter",
    help="Seconds of the run that were no training, by what they went for; of all starts of the run. checkpoint: in "
    "which the loop waited for one; recompute: steps taken again; restart, hang: from a rank's last heartbeat to "
    "its end; requeue: from the last word of a start to the next.",
    set_by="ddptrain",
    labels={"cause": UNPRODUCTIVE_CAUSES},
)
STRAGGLER_SKEW = Metric(
    name="ddp_straggler_skew_ratio",
    kind="gauge",
    help="The slowest rank's time of a step, without waiting for others, by the median of all ranks.",
    set_by="ddptrain",
    by_rank_0=True,
)
RELATIVE_SPEED = Metric(
    name="ddp_rank_relative_speed_ratio",
    kind="gauge",
    help="The fastest rank's time of a step, without waiting for others, by this rank's, 0 to 1.",
    set_by="ddptrain",
)
GRAD_NORM = Metric(
    name="ddp_grad_norm",
    kind="gauge",
    help="Norm of the gradient, over all parameters, lately.",
    set_by="ddptrain",
    by_rank_0=True,
)
COLLECTIVE_TIMEOUTS = Metric(
    name="ddp_collective_timeouts_total",
    kind="counter",
    help="Times that this rank gave up waiting for the others, and ended; NCCL's own watchdog ends it unseen.",
    set_by="ddptrain",
)
DATA_ERRORS = Metric(
    name="ddp_data_errors_total",
    kind="counter",
    help="Files of the data set that were missing or corrupt on this rank; each ends the training.",
    set_by="ddptrain",
    labels={"kind": ("missing", "corrupt")},
)
DEVICE_OOMS = Metric(
    name="ddp_device_ooms_total",
    kind="counter",
    help="Times that this rank asked its GPU for more memory than it has, and ended.",
    set_by="ddptrain",
    needs_gpu=True,
)
TRAINING_INFO = Metric(
    name="ddp_training_info",
    kind="gauge",
    help="Always 1; backend: how gradients travel (none: one rank); device: cpu or cuda.",
    set_by="ddptrain",
    labels={"backend": (), "device": (), "model": (), "dataset": ()},
    by_rank_0=True,
)
STEPS_PLANNED = Metric(
    name="ddp_planned_steps",
    kind="gauge",
    help="The number of the step at which the training will be done.",
    set_by="ddptrain",
    by_rank_0=True,
)
NONFINITE = Metric(
    name="ddp_nonfinite_total",
    kind="counter",
    help="Losses and gradients of this rank that were no numbers; each ends the training.",
    set_by="ddptrain",
    labels={"where": ("loss", "grad")},
)
DEVICE_MEMORY = Metric(
    name="ddp_device_memory_bytes",
    kind="gauge",
    help="The GPU's memory that torch holds for this rank; peak: the most of allocated.",
    set_by="ddptrain",
    labels={"kind": ("allocated", "reserved", "peak")},
    needs_gpu=True,
)
LOSS = Metric(
    name="ddp_loss",
    kind="gauge",
    help="Mean training loss of the last epoch, over all ranks.",
    set_by="ddptrain",
    by_rank_0=True,
)
LEARNING_RATE = Metric(
    name="ddp_learning_rate", kind="gauge", help="Of the last step.", set_by="ddptrain", by_rank_0=True
)
EPOCH = Metric(
    name="ddp_epoch", kind="gauge", help="The epoch that is being trained, from 1.", set_by="ddptrain", by_rank_0=True
)
EVAL_ACCURACY = Metric(
    name="ddp_eval_accuracy_ratio",
    kind="gauge",
    help="Share of held-out samples that were classified rightly, 0 to 1, over all ranks.",
    set_by="ddptrain",
    by_rank_0=True,
    labels={"split": ("test",)},
)
CHECKPOINT_DURATION = Metric(
    name="ddp_checkpoint_duration_seconds",
    kind="histogram",
    help="Wall time of writing or reading a checkpoint.",
    set_by="ddptrain",
    by_rank_0=True,
    labels={"op": ("save", "load")},
    buckets=CHECKPOINT_BUCKETS,
)
CHECKPOINT_LAST_SUCCESS = Metric(
    name="ddp_checkpoint_last_success_timestamp_seconds",
    kind="gauge",
    help="When the newest checkpoint was written, in seconds since the epoch; 0: there is none.",
    set_by="ddptrain",
    by_rank_0=True,
)
CHECKPOINT_LAST_STEP = Metric(
    name="ddp_checkpoint_last_step",
    kind="gauge",
    help="The step of the newest checkpoint.",
    set_by="ddptrain",
    by_rank_0=True,
)
CHECKPOINT_BYTES = Metric(
    name="ddp_checkpoint_bytes", kind="gauge", help="Size of the newest checkpoint.", set_by="ddptrain", by_rank_0=True
)
CHECKPOINTS_RETAINED = Metric(
    name="ddp_checkpoints_retained",
    kind="gauge",
    help="Checkpoints that are in the folder.",
    set_by="ddptrain",
    by_rank_0=True,
)
CHECKPOINT_FAILURES = Metric(
    name="ddp_checkpoint_failures_total",
    kind="counter",
    help="Checkpoints that could not be written or read; incompatible: of another training.",
    set_by="ddptrain",
    by_rank_0=True,
    labels={"op": ("save", "load"), "reason": ("enospc", "io", "truncated", "missing", "corrupt", "incompatible")},
)
CHECKPOINT_FAILURES_KNOWN = (  # what may happen, and is 0 until then
    ("save", "enospc"),
    ("save", "io"),
    *(("load", reason) for reason in ("io", "truncated", "missing", "corrupt", "incompatible")),
)
CHECKPOINT_FALLBACKS = Metric(
    name="ddp_checkpoint_fallbacks_total",
    kind="counter",
    help="Checkpoints that were set aside for an older one.",
    set_by="ddptrain",
    by_rank_0=True,
)
OF_A_RANK: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))

# A straggler: a rank whose own time of a step is so many times the ranks' median, and more than it by so much.
STRAGGLER_RATIO, STRAGGLER_S = 2.0, 0.005  # less is the noise of a machine; the metric of the skew shows less too


def goodput(productive_s: float, unproductive_s: float) -> float | None:
    """Return the goodput of a run, 0 to 1; None: no step was taken yet.

    It is the share of new steps in the time of all ranks, from the start of the first ddprun, over all starts of the
    run: PRODUCTIVE / (PRODUCTIVE + UNPRODUCTIVE), each summed over the ranks and causes. Every place shows this number.
    """
    return productive_s / (productive_s + unproductive_s) if productive_s else None


# ---- What a node's ddprun exports.


BUILD_INFO = Metric(
    name="ddp_build_info",
    kind="gauge",
    help="Always 1; the versions are its labels. image_digest: the container's image as its launcher names it, or "
    "none.",
    set_by="ddprun",
    labels={"version": (), "torch_version": (), "python_version": (), "image_digest": ()},
)
RUN_INFO = Metric(
    name="ddp_run_info",
    kind="gauge",
    help="Always 1; run_id: the run's name; run_uid: what no other run has; user: who launched it; project: "
    "DDP_PROJECT, or Slurm's account; config_sha256: 12 digits of the hash of the script, of its configuration file "
    "and of its arguments but those that say a place.",
    set_by="ddprun",
    labels={"run_id": (), "run_uid": (), "user": (), "project": (), "config_sha256": ()},
)
JOB_STATE = Metric(
    name="ddp_job_state",
    kind="gauge",
    help="1 for the state that this node is in, 0 for the others.",
    set_by="ddprun",
    labels={"state": JOB_STATES},
)
JOB_START = Metric(
    name="ddp_job_start_timestamp_seconds",
    kind="gauge",
    help="When this node's ddprun started, in seconds since the epoch.",
    set_by="ddprun",
)
WORLD_SIZE = Metric(
    name="ddp_world_size", kind="gauge", help="Ranks of the present attempt, over all nodes.", set_by="ddprun"
)
WORLD_SIZE_EXPECTED = Metric(
    name="ddp_world_size_expected",
    kind="gauge",
    help="Ranks of the run when all of its nodes are there.",
    set_by="ddprun",
)
RANKS_ALIVE = Metric(name="ddp_ranks_alive", kind="gauge", help="Ranks of this node that are running.", set_by="ddprun")
RANKS_DONE = Metric(
    name="ddp_ranks_done",
    kind="gauge",
    help="Ranks of this node that have exited with 0 in the present attempt.",
    set_by="ddprun",
)
HEARTBEAT = Metric(
    name="ddp_heartbeat_timestamp_seconds",
    kind="gauge",
    help="When a rank that runs last sent a heartbeat, in seconds since the epoch; none before its first step.",
    set_by="ddprun",
    labels={"rank": ()},
    at_first=False,
)
RANK_EXITS = Metric(
    name="ddp_rank_exits_total",
    kind="counter",
    help="Ranks of this node that ended, by cause; stopped: by ddprun, because another failed or a stop was requested.",
    set_by="ddprun",
    labels={"cause": EXIT_CAUSES},
)
RESTARTS = Metric(
    name="ddp_restarts_total",
    kind="counter",
    help="Starts of all ranks after a failure, by what had failed; stopped: a node that another replaces; requeue: "
    "ddprun itself was started again.",
    set_by="ddprun",
    labels={"reason": RESTART_REASONS},
)
RECOVERY = Metric(
    name="ddp_recovery_seconds",
    kind="gauge",
    help="How long the last restart took: from the failure to the verdict (detect; where the rank fell), to the end of "
    "the ranks, to the meeting of the nodes, to the new ranks (start), all these (total), to their first heartbeat.",
    set_by="ddprun",
    labels={"phase": RECOVERY_PHASES},
)
STEPS_LOST = Metric(
    name="ddp_steps_lost_total",
    kind="counter",
    help="Steps that had to be taken again after restarts, by the heartbeats of this node's ranks.",
    set_by="ddprun",
)
TERMINATION_SIGNALS = Metric(
    name="ddp_termination_signals_total",
    kind="counter",
    help="Signals that asked this node to stop.",
    set_by="ddprun",
    labels={"signal": ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")},
)
HOST_CPU = Metric(
    name="ddp_host_cpu_seconds_total",
    kind="counter",
    help="Seconds that the cores of this machine spent, all together.",
    set_by="ddprun",
    labels={"mode": ("user", "system", "iowait", "idle")},
)
HOST_MEMORY = Metric(
    name="ddp_host_memory_bytes",
    kind="gauge",
    help="Memory of this machine; available: what could be had without swapping.",
    set_by="ddprun",
    labels={"kind": ("total", "available")},
)
HOST_NETWORK = Metric(
    name="ddp_host_network_bytes_total",
    kind="counter",
    help="Bytes over all network interfaces of this machine but the loopback.",
    set_by="ddprun",
    labels={"direction": ("received", "sent")},
)
DEVICE_UTILIZATION = Metric(
    name="ddp_device_utilization_ratio",
    kind="gauge",
    help="Share of the last sample period in which a kernel ran on the GPU, 0 to 1.",
    set_by="ddprun",
    labels={"device": ()},
    needs_gpu=True,
)
DEVICE_MEMORY_USED = Metric(
    name="ddp_device_memory_used_bytes",
    kind="gauge",
    help="Memory of the GPU that is in use, by whomever.",
    set_by="ddprun",
    labels={"device": ()},
    needs_gpu=True,
)
DEVICE_POWER = Metric(
    name="ddp_device_power_watts",
    kind="gauge",
    help="Power that the GPU draws.",
    set_by="ddprun",
    labels={"device": ()},
    needs_gpu=True,
)
DEVICE_TEMPERATURE = Metric(
    name="ddp_device_temperature_celsius",
    kind="gauge",
    help="Temperature of the GPU's die.",
    set_by="ddprun",
    labels={"device": ()},
    needs_gpu=True,
)
CLOCK_OFFSET = Metric(
    name="ddp_clock_offset_seconds",
    kind="gauge",
    help="How far this node's clock was ahead of node 0's when it came.",
    set_by="ddprun",
)
PREFLIGHT_DURATION = Metric(
    name="ddp_preflight_duration_seconds",
    kind="gauge",
    help="How long a step before the start of the ranks took; 0: not taken here.",
    set_by="ddprun",
    labels={"step": PREFLIGHT_STEPS},
)
ENDED = Metric(
    name="ddp_ended_timestamp_seconds",
    kind="gauge",
    help="When the run ended, in seconds since the epoch.",
    set_by="ddprun",
)
ENDED_CODE = Metric(
    name="ddp_ended_exit_code",
    kind="gauge",
    help="The exit code of the run; 0: every rank exited with 0.",
    set_by="ddprun",
)
ENDED_SECONDS = Metric(
    name="ddp_ended_duration_seconds",
    kind="gauge",
    help="From the start of node 0's ddprun to its end.",
    set_by="ddprun",
)
ENDED_INFO = Metric(
    name="ddp_ended_info",
    kind="gauge",
    help="Always 1; cause: as in outcome.json; run_uid: as in ddp_run_info.",
    set_by="ddprun",
    labels={"cause": (), "run_uid": ()},
)

# What a Pushgateway is told of a run that has ended; no endpoint has them.
PUSHED = (ENDED, ENDED_CODE, ENDED_SECONDS, ENDED_INFO)
OF_A_NODE: tuple[Metric, ...] = tuple(
    value for value in globals().values() if isinstance(value, Metric) and value not in (*PUSHED, *OF_A_RANK)
)
CATALOGUE = (*OF_A_NODE, *OF_A_RANK)
