"""Every metric that ddprun and ddptrain export: the one list from which code, docs and tests are made.

The rules are Prometheus' own (https://prometheus.io/docs/practices/naming/): one prefix, base units,
``_total`` on counters, and every label's values known in advance. A rank's process sets its metrics without
saying which rank it is; the node's exporter adds the label ``rank``.
"""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CHECKPOINT_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)

JOB_STATES = ("rendezvous", "training", "succeeded", "failed")
PREFLIGHT_STEPS = ("resolve", "address", "port", "reach", "limits", "compare", "clock", "meet")
EXIT_CAUSES = ("ok", "error", "sigkill", "sigterm", "sigsegv", "sigabrt", "oom", "hang_killed", "stopped", "other")
RESTART_REASONS = ("killed", "oom", "hang", "node_lost")
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
    needs_gpu: bool = False  # there only where NVML finds a device


BUILD_INFO = Metric(
    name="ddp_build_info",
    kind="gauge",
    help="Always 1; the versions are its labels.",
    set_by="ddprun",
    labels={"version": (), "torch_version": (), "python_version": ()},
)
RUN_INFO = Metric(
    name="ddp_run_info",
    kind="gauge",
    help="Always 1; the run's id is its label.",
    set_by="ddprun",
    labels={"run_id": ()},
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
RANKS_ALIVE = Metric(name="ddp_ranks_alive", kind="gauge", help="Ranks of this node that are running.", set_by="ddprun")
RANK_EXITS = Metric(
    name="ddp_rank_exits_total",
    kind="counter",
    help="Ranks of this node that ended, by cause; stopped: by ddprun, because another failed or a stop was asked for.",
    set_by="ddprun",
    labels={"cause": EXIT_CAUSES},
)
RESTARTS = Metric(
    name="ddp_restarts_total",
    kind="counter",
    help="Starts of all ranks after a failure, by what had failed.",
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
    help="Wall time of an optimizer step as the rank's process saw it.",
    set_by="ddptrain",
    buckets=STEP_BUCKETS,
)
LOSS = Metric(
    name="ddp_loss",
    kind="gauge",
    help="Mean training loss of the last epoch, over all ranks.",
    set_by="ddptrain",
)
LEARNING_RATE = Metric(name="ddp_learning_rate", kind="gauge", help="Of the last step.", set_by="ddptrain")
EPOCH = Metric(name="ddp_epoch", kind="gauge", help="The epoch that is being trained, from 1.", set_by="ddptrain")
EVAL_ACCURACY = Metric(
    name="ddp_eval_accuracy_ratio",
    kind="gauge",
    help="Share of held-out samples that were classified rightly, 0 to 1, over all ranks.",
    set_by="ddptrain",
    labels={"split": ("test",)},
)
CHECKPOINT_DURATION = Metric(
    name="ddp_checkpoint_duration_seconds",
    kind="histogram",
    help="Wall time of writing or reading a checkpoint.",
    set_by="ddptrain",
    labels={"op": ("save", "load")},
    buckets=CHECKPOINT_BUCKETS,
)
CHECKPOINT_LAST_SUCCESS = Metric(
    name="ddp_checkpoint_last_success_timestamp_seconds",
    kind="gauge",
    help="When a checkpoint was last written whole, in seconds since the epoch; 0: not yet.",
    set_by="ddptrain",
)
CHECKPOINT_LAST_STEP = Metric(
    name="ddp_checkpoint_last_step",
    kind="gauge",
    help="The step of the newest checkpoint.",
    set_by="ddptrain",
)
CHECKPOINT_BYTES = Metric(
    name="ddp_checkpoint_bytes", kind="gauge", help="Size of the newest checkpoint.", set_by="ddptrain"
)
CHECKPOINT_FAILURES = Metric(
    name="ddp_checkpoint_failures_total",
    kind="counter",
    help="Checkpoints that could not be written or read.",
    set_by="ddptrain",
    labels={"op": ("save", "load"), "reason": ("enospc", "io", "corrupt")},
)

CATALOGUE: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
