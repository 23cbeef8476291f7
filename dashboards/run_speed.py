"""The rows of a run's dashboard about its speed: how it spends its time, and slow ranks."""

from dashboards.panels import bars, number, q, series
from dashboards.selection import of, rate

OWN = 'phase!="comm_exposed"'

SPEED = [
    number(
        "How many samples per second?",
        "suffix: /s",
        "Training samples of all ranks per second, over the last five minutes.",
        q(of("run:ddp_samples:rate5m")),
    ),
    number(
        "How many steps per second?",
        "suffix: /s",
        "Optimizer steps per second, over the last five minutes.",
        q(of("run:ddp_steps:rate5m")),
    ),
    number(
        "How long does a step take?",
        "s",
        "Mean step time of all ranks over the last five minutes.",
        q(of("run:ddp_step_duration_seconds:mean5m")),
    ),
    number(
        "Which step is it at?",
        "short",
        "The number of the last optimizer step, and the epoch.",
        q(f"max({of('ddp_last_step')})", "step"),
        q(f"max({of('ddp_epoch')})", "epoch"),
    ),
    number(
        "How much of the GPUs' peak does the model use?",
        "percentunit",
        "Floating-point operations of the model per second, divided by the peak of all running ranks' GPUs, which is "
        "set above (989 TFLOP/s: an H100 in dense bfloat16). Meaningless on a CPU.",
        q(f"{of('run:ddp_model_flops:rate5m')} / ({of('run:ddp_ranks_alive:sum')} * $peak * 1e12)"),
        width=8,
    ),
    series(
        "Is the speed steady?",
        "suffix: /s",
        "Training samples of all ranks per second. It drops during evaluations, checkpoints and restarts.",
        q(f"sum({rate('ddp_samples_total')})", "samples"),
        width=8,
    ),
    series(
        "Do the steps take equally long?",
        "s",
        "Mean step time of each rank. With DDP it is nearly equal: a slow rank delays all others.",
        q(
            f"sum by (rank) ({rate('ddp_step_duration_seconds_sum')}) "
            f"/ sum by (rank) ({rate('ddp_step_duration_seconds_count')})",
            "rank {{rank}}",
        ),
        width=8,
    ),
    series(
        "What is the learning rate?",
        "sci",
        "The learning rate of the last step.",
        q(f"max({of('ddp_learning_rate')})", "learning rate"),
        width=8,
    ),
]

TIME = [
    series(
        "What does a step spend its time on?",
        "percentunit",
        "Share of the step time by phase, over all ranks. comm_exposed: waiting for the other ranks' gradients.",
        q(of("run:ddp_step_phase:share5m"), "{{phase}}"),
        stacked=True,
        top=1,
    ),
    series(
        "How long is each phase?",
        "s",
        "Seconds of each phase of a step, mean over all ranks. The sum is the step time.",
        q(
            f"sum by (phase) ({rate('ddp_step_phase_seconds_total')}) "
            f"/ ignoring (phase) group_left () sum({rate('ddp_step_duration_seconds_count')})",
            "{{phase}}",
        ),
        stacked=True,
    ),
    series(
        "Is communication hidden?",
        "s",
        "Seconds of gradient communication per step. hidden: during the backward pass; exposed: after it.",
        q(
            f"sum by (overlap) ({rate('ddp_comm_seconds_total')}) "
            f"/ ignoring (overlap) group_left () sum({rate('ddp_step_duration_seconds_count')})",
            "{{overlap}}",
        ),
    ),
    series(
        "What keeps it from training?",
        "percentunit",
        "Share of the ranks' time that was not spent on new steps. recompute: steps repeated after a restart.",
        q(
            f"sum by (cause) ({rate('ddp_unproductive_seconds_total')}) "
            f"/ ignoring (cause) group_left () sum({of('ddp_ranks_alive')} > 0)",
            "{{cause}}",
        ),
        stacked=True,
    ),
]

RANKS = [
    bars(
        "Which rank is slow?",
        "percentunit",
        "The fastest rank's own step time, divided by each rank's. A rank with a short bar slows all others.",
        q(f"sort({of('ddp_rank_relative_speed_ratio')})", "rank {{rank}} on node {{node}}"),
        red_below=0.8,
    ),
    series(
        "How long does each rank work in a step?",
        "s",
        "Step time without waiting for other ranks' gradients. All others wait for the rank with the highest value.",
        q(
            f"sum by (rank, node) ({rate('ddp_step_phase_seconds_total', OWN)}) "
            f"/ sum by (rank, node) ({rate('ddp_step_duration_seconds_count')})",
            "rank {{rank}} on node {{node}}",
        ),
    ),
    series(
        "How uneven are the ranks?",
        "suffix: x",
        "The slowest rank's own step time, divided by the median. 1: all are equally fast. An alert fires above 1.25.",
        q(f"max({of('ddp_straggler_skew_ratio')})", "slowest / median"),
    ),
    series(
        "Are all ranks alive?",
        "s",
        "Time since each rank's last heartbeat. In a hang, the rank that stopped first has the highest value.",
        q(f"time() - max by (rank, node) ({of('ddp_heartbeat_timestamp_seconds')})", "rank {{rank}} on node {{node}}"),
    ),
]
