"""The rank's part of the catalogue: what ddptrain exports, and in part a script by ddpwire.script.

A rank's process sets its metrics without saying which rank it is; the node's exporter adds the label ``rank``.
"""

from ddpwire.metric import Metric

# A rank has 80 series at the most. Few buckets tell a jam from a step; the mean is exact, from _sum and _count.
STEP_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 60.0)
CHECKPOINT_BUCKETS = (0.1, 1.0, 10.0, 100.0)
STEP_PHASES = ("data", "h2d", "forward", "backward", "comm_exposed", "optimizer", "other")
UNPRODUCTIVE_CAUSES = (
    "startup",  # of the rank's process, until its first step
    "rendezvous",  # of the nodes, from their start, or from the end of the failed ranks
    "restore",  # reading a checkpoint
    "recompute",  # steps that had been taken before a failure
    "checkpoint",  # in which the loop waited for one
    "evaluation",
    "hang",  # from the last sign of life of ranks that hung to their end
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
    "which the loop waited for one; recompute: steps taken again; restart, hang: from a rank's last sign of life to "
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
    help="When a checkpoint was last written whole, in seconds since the epoch; 0: not yet.",
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
