"""The rows of a run's dashboard about time: how fast it is, where the time goes, which rank is slow."""

from dashboards.panels import bars, number, q, series
from dashboards.selection import of, rate

OWN = 'phase!="comm_exposed"'

SPEED = [
    number(
        "How many samples per second?",
        "suffix: /s",
        "Training samples of all ranks, over the last five minutes.",
        q(of("run:ddp_samples:rate5m")),
    ),
    number(
        "How many steps a second?",
        "suffix: /s",
        "Optimizer steps, over the last five minutes.",
        q(of("run:ddp_steps:rate5m")),
    ),
    number(
        "How long does a step take?",
        "s",
        "Mean over the last five minutes and all ranks.",
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
        "Model FLOP utilisation: operations that the model needs, by the peak that is chosen above, for all ranks that "
        "run. 989 is an H100's dense bfloat16; on a CPU it says nothing.",
        q(f"{of('run:ddp_model_flops:rate5m')} / ({of('run:ddp_ranks_alive:sum')} * $peak * 1e12)"),
        width=8,
    ),
    series(
        "Does the speed hold?",
        "suffix: /s",
        "Training samples of all ranks a second. Dips: evaluation, checkpoints, restarts.",
        q(f"sum({rate('ddp_samples_total')})", "samples"),
        width=8,
    ),
    series(
        "Do the steps take equally long?",
        "s",
        "Mean time of a step on each rank. With DDP they are alike: who waits for whom is told below.",
        q(
            f"sum by (rank) ({rate('ddp_step_duration_seconds_sum')}) "
            f"/ sum by (rank) ({rate('ddp_step_duration_seconds_count')})",
            "rank {{rank}}",
        ),
        width=8,
    ),
    series(
        "Which learning rate is it at?",
        "sci",
        "Of the last step.",
        q(f"max({of('ddp_learning_rate')})", "learning rate"),
        width=8,
    ),
]

TIME = [
    series(
        "What does a step spend its time on?",
        "percentunit",
        "Share of the steps by phase, over all ranks; comm_exposed: waiting for the other ranks' gradients.",
        q(of("run:ddp_step_phase:share5m"), "{{phase}}"),
        stacked=True,
        top=1,
    ),
    series(
        "How long is each phase?",
        "s",
        "Seconds of a step by phase, mean over all ranks; together they are the step.",
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
        "Seconds a step in which gradients travelled: hidden beside the backward pass, or exposed after it.",
        q(
            f"sum by (overlap) ({rate('ddp_comm_seconds_total')}) "
            f"/ ignoring (overlap) group_left () sum({rate('ddp_step_duration_seconds_count')})",
            "{{overlap}}",
        ),
    ),
    series(
        "What keeps it from training?",
        "percentunit",
        "Share of the ranks' time that was no new step, by cause. recompute: steps taken again after a restart.",
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
        "The fastest rank's time of a step by each rank's own, without waiting for others. A short bar slows them all.",
        q(f"sort({of('ddp_rank_relative_speed_ratio')})", "rank {{rank}} on node {{node}}"),
        red_below=0.8,
    ),
    series(
        "How long does each rank work in a step?",
        "s",
        "A step without waiting for the other ranks' gradients: who is on top is waited for.",
        q(
            f"sum by (rank, node) ({rate('ddp_step_phase_seconds_total', OWN)}) "
            f"/ sum by (rank, node) ({rate('ddp_step_duration_seconds_count')})",
            "rank {{rank}} on node {{node}}",
        ),
    ),
    series(
        "How uneven are the ranks?",
        "suffix: x",
        "The slowest rank's own time of a step by the median of all ranks: 1 is even; above 1.25 an alert fires.",
        q(f"max({of('ddp_straggler_skew_ratio')})", "slowest / median"),
    ),
    series(
        "Does every rank live?",
        "s",
        "Seconds since each rank's last sign of life. In a hang the rank that stopped first is on top.",
        q(f"time() - max by (rank, node) ({of('ddp_heartbeat_timestamp_seconds')})", "rank {{rank}} on node {{node}}"),
    ),
]
