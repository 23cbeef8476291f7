"""The rows of a run's dashboard about what may go: checkpoints, what was lost, the machines."""

from dashboards.panels import number, q, rows_of, series
from dashboards.selection import increase, of, rate

BUSY, FREE, PEAK = 'mode!="idle"', 'kind="available"', 'kind="peak"'

CHECKPOINT = [
    number(
        "How old is the newest checkpoint?",
        "s",
        "What would be lost if the run ended now; since the start where that is later.",
        q(of("run:ddp_checkpoint_age_seconds:min")),
        red=3600,
    ),
    number(
        "How many steps are not saved?",
        "short",
        "Steps since the newest checkpoint.",
        q(f"max({of('ddp_last_step')}) - max({of('ddp_checkpoint_last_step')})"),
    ),
    number("How large is it?", "bytes", "The newest checkpoint.", q(f"max({of('ddp_checkpoint_bytes')})")),
    number("How many are kept?", "short", "Checkpoints in the folder.", q(f"max({of('ddp_checkpoints_retained')})")),
    number(
        "How many could not be written or read?",
        "short",
        "Within the time shown; beside it those that were set aside for an older one.",
        q(f"sum({increase('ddp_checkpoint_failures_total')})", "failed"),
        q(f"sum({increase('ddp_checkpoint_fallbacks_total')})", "set aside"),
        width=8,
        red=1,
    ),
    series(
        "How long does a checkpoint take?",
        "s",
        "Mean time of writing and reading one; the loop waits only for the copy.",
        q(
            f"sum by (op) ({rate('ddp_checkpoint_duration_seconds_sum')}) "
            f"/ sum by (op) ({rate('ddp_checkpoint_duration_seconds_count')} > 0)",
            "{{op}}",
        ),
    ),
    series(
        "Is the checkpoint fresh all the time?",
        "s",
        "Its age; each save brings it to 0.",
        q(of("run:ddp_checkpoint_age_seconds:min"), "age"),
    ),
]

LOST = [
    number(
        "How often did it start again?",
        "short",
        "Starts of all ranks after a failure, since the run's nodes started.",
        q(f"max(sum by (node) ({of('ddp_restarts_total')}))"),
        red=1,
    ),
    number(
        "How many steps were taken twice?",
        "short",
        "Steps since the checkpoint that a restart went back to.",
        q(f"max({of('ddp_steps_lost_total')})"),
        red=1,
    ),
    number(
        "How much time did it lose?",
        "s",
        "Mean over the ranks of the seconds that were no new step, over all starts of the run.",
        q(f"sum({of('ddp_unproductive_seconds_total')}) / max({of('ddp_world_size')})"),
    ),
    number(
        "Was any number none?",
        "short",
        "Losses and gradients that were not finite.",
        q(f"sum by (where) ({of('ddp_nonfinite_total')})", "{{where}}"),
        red=1,
    ),
    number(
        "Did data, waiting or memory fail a rank?",
        "short",
        "Data files that were missing or corrupt, ranks that gave up waiting for others, GPUs whose memory was full.",
        q(f"sum({of('ddp_data_errors_total')})", "data"),
        q(f"sum({of('ddp_collective_timeouts_total')})", "timeouts"),
        q(f"sum({of('ddp_device_ooms_total')})", "memory"),
        red=1,
    ),
    number(
        "Was it asked to stop?",
        "short",
        "Signals to its nodes: a scheduler's preemption or a person's.",
        q(f"sum by (signal) ({of('ddp_termination_signals_total')})", "{{signal}}"),
    ),
    series(
        "Why did it start again?",
        "short",
        "Restarts by what had failed, since the run's nodes started.",
        q(f"max by (reason) ({of('ddp_restarts_total')})", "{{reason}}"),
        width=8,
    ),
    series(
        "How did ranks end?",
        "short",
        "By cause, over all nodes; stopped: by ddprun, because another had failed or a stop was requested.",
        q(f"sum by (cause) ({of('ddp_rank_exits_total')})", "{{cause}}"),
        width=8,
    ),
    series(
        "How long did the last restart take?",
        "s",
        "From the failure to the verdict (detect) to the first step of the new ranks; the slowest node.",
        q(f"max by (phase) ({of('ddp_recovery_seconds')})", "{{phase}}"),
        width=8,
    ),
]

MACHINES = [
    series(
        "Are the cores busy?",
        "percentunit",
        "Share of each machine's cores that worked. 2 nodes on one machine show the same.",
        q(
            f"sum by (node) ({rate('ddp_host_cpu_seconds_total', BUSY)}) "
            f"/ sum by (node) ({rate('ddp_host_cpu_seconds_total')})",
            "node {{node}}",
        ),
        width=8,
        top=1,
    ),
    series(
        "How much memory is left?",
        "bytes",
        "Of each machine, without swapping.",
        q(f"max by (node) ({of('ddp_host_memory_bytes', FREE)})", "node {{node}}"),
        width=8,
    ),
    series(
        "What goes over the network?",
        "binBps",
        "All interfaces of each machine but the loopback.",
        q(f"sum by (node, direction) ({rate('ddp_host_network_bytes_total')})", "node {{node}} {{direction}}"),
        width=8,
    ),
    series(
        "Are the GPUs busy?",
        "percentunit",
        "Share of the time in which a kernel ran: 100 % says not that it ran well. Needs a GPU.",
        q(of("ddp_device_utilization_ratio"), "node {{node}} GPU {{device}}"),
        width=6,
        top=1,
    ),
    series(
        "How full is the GPUs' memory?",
        "bytes",
        "In use by whomever; and the most that torch had allocated on any rank. Needs a GPU.",
        q(of("ddp_device_memory_used_bytes"), "node {{node}} GPU {{device}}"),
        q(f"max({of('ddp_device_memory_bytes', PEAK)})", "most of torch's"),
        width=6,
    ),
    series(
        "Do the GPUs get their power?",
        "watt",
        "A GPU far below its neighbours is throttled or waits. Needs a GPU.",
        q(of("ddp_device_power_watts"), "node {{node}} GPU {{device}}"),
        width=6,
    ),
    series(
        "Are the GPUs too hot?",
        "celsius",
        "Of the die; most throttle from 85 to 90 degrees on. Needs a GPU.",
        q(of("ddp_device_temperature_celsius"), "node {{node}} GPU {{device}}"),
        width=6,
    ),
    rows_of(
        "What runs on each node?",
        "Its versions, and how far its clock is ahead of node 0's.",
        {
            "nodes": ("none", q(of("ddp_build_info"))),
            "clock ahead": ("s", q(f"max by (node, instance) ({of('ddp_clock_offset_seconds')})")),
        },
        hidden=("Time", "Value #A", "__name__", "job", "namespace", "job_id"),
        height=6,
    ),
]
