"""The rows of a run's dashboard about checkpoints, lost time and the machines."""

from dashboards.panels import number, q, rows_of, series
from dashboards.selection import increase, of, rate

BUSY, FREE, PEAK = 'mode!="idle"', 'kind="available"', 'kind="peak"'

CHECKPOINT = [
    number(
        "How old is the newest checkpoint?",
        "s",
        "The training time that would be lost if the run failed now. Counted from the start if no checkpoint is newer.",
        q(of("run:ddp_checkpoint_age_seconds:min")),
        red=3600,
    ),
    number(
        "How many steps are not saved?",
        "short",
        "Steps since the newest checkpoint.",
        q(f"max({of('ddp_last_step')}) - max({of('ddp_checkpoint_last_step')})"),
    ),
    number(
        "How large is the newest checkpoint?",
        "bytes",
        "Size of the newest checkpoint.",
        q(f"max({of('ddp_checkpoint_bytes')})"),
    ),
    number(
        "How many checkpoints are kept?",
        "short",
        "Number of checkpoints in the folder.",
        q(f"max({of('ddp_checkpoints_retained')})"),
    ),
    number(
        "How many checkpoints failed?",
        "short",
        "Checkpoints that could not be written or read, and damaged ones for which an older one was loaded.",
        q(f"sum({increase('ddp_checkpoint_failures_total')})", "failed"),
        q(f"sum({increase('ddp_checkpoint_fallbacks_total')})", "set aside"),
        width=8,
        red=1,
    ),
    series(
        "How long does a checkpoint take?",
        "s",
        "Mean time to write or read a checkpoint. With ddptrain, training only waits for the copy in memory.",
        q(
            f"sum by (op) ({rate('ddp_checkpoint_duration_seconds_sum')}) "
            f"/ sum by (op) ({rate('ddp_checkpoint_duration_seconds_count')} > 0)",
            "{{op}}",
        ),
    ),
    series(
        "How old was the newest checkpoint over time?",
        "s",
        "Age of the newest checkpoint. It falls to 0 with each save.",
        q(of("run:ddp_checkpoint_age_seconds:min"), "age"),
    ),
]

LOST = [
    number(
        "How often was it restarted?",
        "short",
        "Number of times that all ranks were restarted, since the run's nodes started.",
        q(f"max(sum by (node) ({of('ddp_restarts_total')}))"),
        red=1,
    ),
    number(
        "How many steps were repeated?",
        "short",
        "Steps that were repeated after restarts.",
        q(f"max({of('ddp_steps_lost_total')})"),
        red=1,
    ),
    number(
        "How much time did it lose?",
        "s",
        "Time not spent on new steps, over all starts of the run; mean over the ranks.",
        q(f"sum({of('ddp_unproductive_seconds_total')}) / max({of('ddp_world_size')})"),
    ),
    number(
        "Were any values not finite?",
        "short",
        "Losses and gradients that were NaN or infinite.",
        q(f"sum by (where) ({of('ddp_nonfinite_total')})", "{{where}}"),
        red=1,
    ),
    number(
        "Did data, time-outs or memory end a rank?",
        "short",
        "Missing or corrupt data files, collectives that timed out, and ranks that ran out of GPU memory.",
        q(f"sum({of('ddp_data_errors_total')})", "data"),
        q(f"sum({of('ddp_collective_timeouts_total')})", "timeouts"),
        q(f"sum({of('ddp_device_ooms_total')})", "memory"),
        red=1,
    ),
    number(
        "Was it asked to stop?",
        "short",
        "Signals that asked the run's nodes to stop.",
        q(f"sum by (signal) ({of('ddp_termination_signals_total')})", "{{signal}}"),
    ),
    series(
        "Why was it restarted?",
        "short",
        "Restarts by cause, since the run's nodes started.",
        q(f"max by (reason) ({of('ddp_restarts_total')})", "{{reason}}"),
        width=8,
    ),
    series(
        "How did ranks end?",
        "short",
        "Ended ranks of all nodes. stopped: ended by ddprun after another rank's failure or a stop request.",
        q(f"sum by (cause) ({of('ddp_rank_exits_total')})", "{{cause}}"),
        width=8,
    ),
    series(
        "How long did the last restart take?",
        "s",
        "Time of each phase, from detecting the failure to the first step after it; of the slowest node.",
        q(f"max by (phase) ({of('ddp_recovery_seconds')})", "{{phase}}"),
        width=8,
    ),
]

MACHINES = [
    series(
        "Are the cores busy?",
        "percentunit",
        "Share of each machine's CPU time that was used. Two nodes on one machine show the same value.",
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
        "Memory of each machine that can be used without swapping.",
        q(f"max by (node) ({of('ddp_host_memory_bytes', FREE)})", "node {{node}}"),
        width=8,
    ),
    series(
        "How much network traffic is there?",
        "binBps",
        "Traffic over all network interfaces of each machine except the loopback.",
        q(f"sum by (node, direction) ({rate('ddp_host_network_bytes_total')})", "node {{node}} {{direction}}"),
        width=8,
    ),
    series(
        "Are the GPUs busy?",
        "percentunit",
        "Share of the time in which a kernel ran; it does not show how efficient the kernel was. Needs a GPU.",
        q(of("ddp_device_utilization_ratio"), "node {{node}} GPU {{device}}"),
        width=6,
        top=1,
    ),
    series(
        "How full is the GPUs' memory?",
        "bytes",
        "Memory used by all processes, and the largest amount that torch has allocated on a rank. Needs a GPU.",
        q(of("ddp_device_memory_used_bytes"), "node {{node}} GPU {{device}}"),
        q(f"max({of('ddp_device_memory_bytes', PEAK)})", "largest allocation by torch"),
        width=6,
    ),
    series(
        "How much power do the GPUs draw?",
        "watt",
        "A GPU that draws much less power than the others is throttled or waits. Needs a GPU.",
        q(of("ddp_device_power_watts"), "node {{node}} GPU {{device}}"),
        width=6,
    ),
    series(
        "How hot are the GPUs?",
        "celsius",
        "Temperature of the chip. Most GPUs throttle from 85 to 90 degrees. Needs a GPU.",
        q(of("ddp_device_temperature_celsius"), "node {{node}} GPU {{device}}"),
        width=6,
    ),
    rows_of(
        "Which versions run on each node?",
        "The versions on each node, and how far its clock is ahead of node 0's.",
        {
            "nodes": ("none", q(of("ddp_build_info"))),
            "clock ahead": ("s", q(f"max by (node, instance) ({of('ddp_clock_offset_seconds')})")),
        },
        hidden=("Time", "Value #A", "__name__", "job", "namespace", "job_id"),
        height=6,
    ),
]
