"""The catalogue of all metrics that ddprun and ddptrain export. The code, the documentation and the tests read it.

Names follow Prometheus' rules (https://prometheus.io/docs/practices/naming/): one prefix, base units, ``_total`` for
counters. The possible values of a label are known in advance, or a process sets the value once.
"""

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
# A rank has at most 80 series. A few buckets suffice to see a stall; _sum and _count give the exact mean.
STEP_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 60.0)
CHECKPOINT_BUCKETS = (0.1, 1.0, 10.0, 100.0)
STEP_PHASES = ("data", "h2d", "forward", "backward", "comm_exposed", "optimizer", "other")
JOB_STATES = ("rendezvous", "starting", "training", "restarting", "stopping", "succeeded", "stopped", "failed")
PREFLIGHT_STEPS = ("resolve", "address", "port", "reach", "limits", "compare", "clock", "meet")
EXIT_CAUSES = ("ok", "error", "sigkill", "sigterm", "sigsegv", "sigabrt", "oom", "hang_killed", "stopped", "other")
RESTART_REASONS = ("killed", "oom", "hang", "node_lost", "error", "stopped", "requeue")
RECOVERY_PHASES = ("detect", "teardown", "rendezvous", "start", "total", "first_step")


@dataclass(frozen=True)
class Metric:
    """One metric. ``labels`` maps each label to its possible values.

    If the tuple is empty, the value can be any text that a process sets once, such as a version or a run's id.
    """

    name: str
    help: str
    _: KW_ONLY
    set_by: Literal["ddprun", "ddptrain"]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    needs_gpu: bool = False  # exported only on a machine with a GPU
    by_rank_0: bool = False  # the same on all ranks, so only rank 0 exports it
    at_first: bool = True  # whether it has a sample from the start

    @property
    def kind(self) -> Kind:
        """The kind. A metric with buckets is a histogram. A metric with a name that ends in ``_total`` is a counter."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"


_of_node = partial(Metric, set_by="ddprun")
_of_gpu = partial(_of_node, labels={"device": ()}, needs_gpu=True)
_of_rank = partial(Metric, set_by="ddptrain")
_of_rank_0 = partial(_of_rank, by_rank_0=True)

# ---- The metrics of a rank. ddptrain sets all of them, and a script with ddpwire.script sets some. ddprun adds the
# label ``rank``.

UNPRODUCTIVE_CAUSES = (
    "startup",  # of the rank's process, until its first step
    "rendezvous",  # of the nodes, from their start, or from the end of the failed ranks
    "restore",  # reading a checkpoint
    "recompute",  # steps that had been taken before a failure
    "checkpoint",  # time in which the loop waited for a checkpoint
    "evaluation",
    "hang",  # from the last heartbeat of ranks that hung to their end
    "restart",  # from the last heartbeat of ranks that failed in another way to their end
    "requeue",  # from the last recorded event until ddprun is started again
)
STEPS = _of_rank("ddp_steps_total", "Optimizer steps taken.")
SAMPLES = _of_rank("ddp_samples_total", "Training samples that this rank has seen.")
LAST_STEP = _of_rank("ddp_last_step", "The number of the last optimizer step.")
LAST_STEP_TIME = _of_rank(
    "ddp_last_step_timestamp_seconds", "When the last optimizer step ended, in seconds since the epoch."
)
STEP_DURATION = _of_rank(
    "ddp_step_duration_seconds",
    "Time of an optimizer step, measured by the clock on a CPU and by GPU events on a GPU. With ddpwire.script, the "
    "time between two reported steps.",
    buckets=STEP_BUCKETS,
)
STEP_PHASE = _of_rank(
    "ddp_step_phase_seconds_total",
    "Seconds of the steps by phase. comm_exposed: waiting for the other ranks' gradients.",
    labels={"phase": STEP_PHASES},
)
COMM = _of_rank(
    "ddp_comm_seconds_total",
    "Seconds of gradient communication. hidden is the time during the backward pass, estimated from every hundredth "
    "step, because DDP measures only these steps. exposed is the time after the backward pass, as in comm_exposed.",
    labels={"overlap": ("hidden", "exposed")},
)
MODEL_FLOPS = _of_rank(
    "ddp_model_flops_total",
    "Floating-point operations of the model's steps on this rank: 3 times those of a forward pass.",
)
PRODUCTIVE = _of_rank(
    "ddp_productive_seconds_total",
    "Seconds spent on new steps, not on repeated ones, over all starts of the run.",
)
UNPRODUCTIVE = _of_rank(
    "ddp_unproductive_seconds_total",
    "Seconds of the run that were not spent on new steps, by cause, over all starts of the run. checkpoint: the "
    "training loop waited for a checkpoint. recompute: repeated steps. restart, hang: from a rank's last heartbeat to "
    "its end. requeue: from the last recorded event until ddprun is started again.",
    labels={"cause": UNPRODUCTIVE_CAUSES},
)
STRAGGLER_SKEW = _of_rank_0(
    "ddp_straggler_skew_ratio",
    "The slowest rank's step time divided by the median of all ranks. "
    "A step time does not include waiting for other ranks.",
)
RELATIVE_SPEED = _of_rank(
    "ddp_rank_relative_speed_ratio",
    "The fastest rank's step time divided by this rank's (0 to 1). "
    "A step time does not include waiting for other ranks.",
)
GRAD_NORM = _of_rank_0("ddp_grad_norm", "Recent norm of the gradient over all parameters.")
COLLECTIVE_TIMEOUTS = _of_rank(
    "ddp_collective_timeouts_total",
    "Number of times this rank ended because a collective timed out. Ranks that NCCL's watchdog ends are not counted.",
)
DATA_ERRORS = _of_rank(
    "ddp_data_errors_total",
    "Files of the data set that were missing or corrupt on this rank. Each such file ends the training.",
    labels={"kind": ("missing", "corrupt")},
)
DEVICE_OOMS = _of_rank(
    "ddp_device_ooms_total",
    "Number of times this rank ended because it ran out of GPU memory.",
    needs_gpu=True,
)
TRAINING_INFO = _of_rank_0(
    "ddp_training_info",
    "Always 1. backend: what exchanges gradients (none if there is only one rank). device: cpu or cuda.",
    labels={"backend": (), "device": (), "model": (), "dataset": ()},
)
STEPS_PLANNED = _of_rank_0("ddp_planned_steps", "Number of the last step that is planned.")
NONFINITE = _of_rank(
    "ddp_nonfinite_total",
    "Losses and gradients of this rank that were NaN or infinite. Each of them ends the training.",
    labels={"where": ("loss", "grad")},
)
DEVICE_MEMORY = _of_rank(
    "ddp_device_memory_bytes",
    "GPU memory that torch holds for this rank. peak: the highest value of allocated.",
    labels={"kind": ("allocated", "reserved", "peak")},
    needs_gpu=True,
)
LOSS = _of_rank_0(
    "ddp_loss",
    "Mean training loss of the last epoch over all ranks. With ddpwire.script, the last loss that each rank reported.",
)
LEARNING_RATE = _of_rank_0("ddp_learning_rate", "The learning rate of the last step.")
EPOCH = _of_rank_0("ddp_epoch", "The epoch that is being trained, from 1.")
EVAL_ACCURACY = _of_rank_0(
    "ddp_eval_accuracy_ratio",
    "Share of held-out samples that were classified correctly, 0 to 1, over all ranks.",
    labels={"split": ("test",)},
)
CHECKPOINT_DURATION = _of_rank_0(
    "ddp_checkpoint_duration_seconds",
    "Wall time of writing or reading a checkpoint.",
    labels={"op": ("save", "load")},
    buckets=CHECKPOINT_BUCKETS,
)
CHECKPOINT_LAST_SUCCESS = _of_rank_0(
    "ddp_checkpoint_last_success_timestamp_seconds",
    "When the newest checkpoint was written, in seconds since the epoch. 0 if there is none.",
)
CHECKPOINT_LAST_STEP = _of_rank_0("ddp_checkpoint_last_step", "The step of the newest checkpoint.")
CHECKPOINT_BYTES = _of_rank_0("ddp_checkpoint_bytes", "Size of the newest checkpoint.")
CHECKPOINTS_RETAINED = _of_rank_0("ddp_checkpoints_retained", "Checkpoints that are in the folder.")
CHECKPOINT_FAILURES = _of_rank_0(
    "ddp_checkpoint_failures_total",
    "Checkpoints that could not be written or read. incompatible: the checkpoint belongs to another training.",
    labels={"op": ("save", "load"), "reason": ("enospc", "io", "truncated", "missing", "corrupt", "incompatible")},
)
CHECKPOINT_FAILURES_KNOWN = (  # the possible pairs of op and reason, which are exported as 0 at first
    ("save", "enospc"),
    ("save", "io"),
    *(("load", reason) for reason in ("io", "truncated", "missing", "corrupt", "incompatible")),
)
CHECKPOINT_FALLBACKS = _of_rank_0(
    "ddp_checkpoint_fallbacks_total", "Checkpoints that could not be used, so an older one was loaded."
)
OF_A_RANK: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))

# A rank is a straggler if its own time for a step exceeds the ranks' median by this factor and by this many seconds.
# The skew metric shows smaller differences as well.
STRAGGLER_RATIO, STRAGGLER_S = 2.0, 0.005


def goodput(productive_s: float, unproductive_s: float) -> float | None:
    """Return the goodput of a run, from 0 to 1, or None if no step was taken yet.

    Goodput is the share of the time that the ranks spent on new steps: PRODUCTIVE / (PRODUCTIVE + UNPRODUCTIVE), each
    summed over the ranks and causes. The time begins with the first start of ddprun, and all later starts of the run
    count as well.
    """
    return productive_s / (productive_s + unproductive_s) if productive_s else None


# ---- The metrics of a node, which its ddprun sets.

BUILD_INFO = _of_node(
    "ddp_build_info",
    "Always 1. The labels are versions. image_digest: the digest in DDP_IMAGE, else DDP_IMAGE itself, or none.",
    labels={"version": (), "torch_version": (), "python_version": (), "image_digest": ()},
)
RUN_INFO = _of_node(
    "ddp_run_info",
    "Always 1. run_id: the run's name. run_uid: the run's unique ID. user: who launched the run. project: DDP_PROJECT, "
    "or Slurm's account. config_sha256: 12 digits of a hash of the script, its configuration files and its arguments, "
    "except those that may differ between nodes.",
    labels={"run_id": (), "run_uid": (), "user": (), "project": (), "config_sha256": ()},
)
JOB_STATE = _of_node(
    "ddp_job_state",
    "1 for the state that this node is in, 0 for the others. A node is in the state training as soon as its ranks have "
    "started. ddpctl status shows running instead until a step is reported.",
    labels={"state": JOB_STATES},
)
JOB_START = _of_node("ddp_job_start_timestamp_seconds", "When this node's ddprun started, in seconds since the epoch.")
WORLD_SIZE = _of_node("ddp_world_size", "Number of ranks of the current attempt, over all nodes.")
WORLD_SIZE_EXPECTED = _of_node("ddp_world_size_expected", "Number of ranks of the run if all of its nodes join.")
RANKS_ALIVE = _of_node("ddp_ranks_alive", "Number of running ranks of this node.")
RANKS_DONE = _of_node("ddp_ranks_done", "Number of ranks of this node that exited with 0 in the current attempt.")
HEARTBEAT = _of_node(
    "ddp_heartbeat_timestamp_seconds",
    "When a running rank sent its last heartbeat, in seconds since the epoch. Absent before its first step.",
    labels={"rank": ()},
    at_first=False,
)
RANK_EXITS = _of_node(
    "ddp_rank_exits_total",
    "Ranks of this node that ended, by cause. stopped: ddprun ended the rank, because another rank failed or because a "
    "stop was requested.",
    labels={"cause": EXIT_CAUSES},
)
RESTARTS = _of_node(
    "ddp_restarts_total",
    "Restarts of all ranks, by cause. stopped: a node was stopped and replaced. requeue: ddprun itself was started "
    "again.",
    labels={"reason": RESTART_REASONS},
)
RECOVERY = _of_node(
    "ddp_recovery_seconds",
    "Duration of each phase of the last restart: detecting the failure (on the node of the failed rank), ending the "
    "ranks, rendezvous, starting new ranks. total: their sum. first_step: until the first heartbeat.",
    labels={"phase": RECOVERY_PHASES},
)
STEPS_LOST = _of_node(
    "ddp_steps_lost_total", "Steps that were repeated after restarts, according to the heartbeats of this node's ranks."
)
TERMINATION_SIGNALS = _of_node(
    "ddp_termination_signals_total",
    "Signals that asked this node to stop.",
    labels={"signal": ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")},
)
HOST_CPU = _of_node(
    "ddp_host_cpu_seconds_total",
    "Seconds that all cores of this machine spent in each mode.",
    labels={"mode": ("user", "system", "iowait", "idle")},
)
HOST_MEMORY = _of_node(
    "ddp_host_memory_bytes",
    "Memory of this machine. available: what can be used without swapping.",
    labels={"kind": ("total", "available")},
)
HOST_NETWORK = _of_node(
    "ddp_host_network_bytes_total",
    "Bytes over all network interfaces of this machine except the loopback.",
    labels={"direction": ("received", "sent")},
)
DEVICE_UTILIZATION = _of_gpu(
    "ddp_device_utilization_ratio", "Share of the last sample period in which a kernel ran on the GPU, 0 to 1."
)
DEVICE_MEMORY_USED = _of_gpu("ddp_device_memory_used_bytes", "Memory of the GPU that is used by any process.")
DEVICE_POWER = _of_gpu("ddp_device_power_watts", "Power that the GPU draws.")
DEVICE_TEMPERATURE = _of_gpu("ddp_device_temperature_celsius", "Temperature of the GPU.")
CLOCK_OFFSET = _of_node("ddp_clock_offset_seconds", "How far this node's clock was ahead of node 0's when it joined.")
PREFLIGHT_DURATION = _of_node(
    "ddp_preflight_duration_seconds",
    "Duration of a preflight step, before the ranks start. 0 if this node did not run the step.",
    labels={"step": PREFLIGHT_STEPS},
)
ENDED = _of_node("ddp_ended_timestamp_seconds", "When the run ended, in seconds since the epoch.")
ENDED_CODE = _of_node("ddp_ended_exit_code", "The exit code of the run. 0: every rank exited with 0.")
ENDED_SECONDS = _of_node("ddp_ended_duration_seconds", "From the start of node 0's ddprun to its end.")
ENDED_INFO = _of_node(
    "ddp_ended_info",
    "Always 1. cause: as in outcome.json. run_uid: as in ddp_run_info.",
    labels={"cause": (), "run_uid": ()},
)

# ddprun pushes these metrics to a Pushgateway when a run has ended. No endpoint exports them.
PUSHED = (ENDED, ENDED_CODE, ENDED_SECONDS, ENDED_INFO)
OF_A_NODE: tuple[Metric, ...] = tuple(
    value for value in globals().values() if isinstance(value, Metric) and value not in (*PUSHED, *OF_A_RANK)
)
CATALOGUE = (*OF_A_NODE, *OF_A_RANK)
