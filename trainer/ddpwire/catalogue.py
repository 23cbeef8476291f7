"""Every metric that ddprun and ddptrain export: the one list from which code, docs and tests are made.

The rules are Prometheus' own (https://prometheus.io/docs/practices/naming/): one prefix, base units,
``_total`` on counters, and every label's values known in advance. Here stands what a node's ddprun exports.
"""

from ddpwire.metric import Metric as Metric
from ddpwire.rank_catalogue import OF_A_RANK

JOB_STATES = ("rendezvous", "training", "restarting", "stopping", "succeeded", "failed")
PREFLIGHT_STEPS = ("resolve", "address", "port", "reach", "limits", "compare", "clock", "meet")
EXIT_CAUSES = ("ok", "error", "sigkill", "sigterm", "sigsegv", "sigabrt", "oom", "hang_killed", "stopped", "other")
RESTART_REASONS = ("killed", "oom", "hang", "node_lost")
RECOVERY_PHASES = ("detect", "teardown", "rendezvous", "start", "total", "first_step")

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
    help="Always 1; run_id: the run's; config_sha256: 12 digits of the hash of the script, of its configuration file "
    "and of its arguments but those that say a place.",
    set_by="ddprun",
    labels={"run_id": (), "config_sha256": ()},
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
HEARTBEAT = Metric(
    name="ddp_heartbeat_timestamp_seconds",
    kind="gauge",
    help="When a rank of the present attempt last gave a sign of life, in seconds since the epoch; none before its "
    "first step.",
    set_by="ddprun",
    labels={"rank": ()},
    at_first=False,
)
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
    help="Always 1; cause: as in outcome.json.",
    set_by="ddprun",
    labels={"cause": ()},
)
# What a Pushgateway is told of a run that has ended; no endpoint has them.
PUSHED = (ENDED, ENDED_CODE, ENDED_SECONDS, ENDED_INFO)

CATALOGUE: tuple[Metric, ...] = (
    *(value for value in globals().values() if isinstance(value, Metric) and value not in PUSHED),
    *OF_A_RANK,
)
