"""The alerts: what each waits for, for how long, and what it says. docs/alerts.md has a paragraph for each.

Severity: critical is a run that makes no progress or is about to lose work; warning is one that is slower or less
safe than it should be.
"""

from dataclasses import dataclass
from typing import Literal

from ddpctl.monitoring.limits import Limits
from ddpctl.monitoring.rules import RUN

TRAINING = f'on ({RUN}) (max by ({RUN}) (ddp_job_state{{state="training"}}) == 1)'
RUNBOOKS = "https://github.com/ddpctl/ddpctl/blob/main/docs/alerts.md"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert; ``summary`` and ``description`` are Prometheus' templates."""

    name: str
    expr: str
    hold_s: float
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """Where its paragraph is."""
        return f"{RUNBOOKS}#{self.name.lower()}"


def alerts(limits: Limits) -> tuple[Alert, ...]:
    """All of them, with these limits."""
    return (*_progress(limits), *_speed(limits), *_safety(limits), *_order(limits))


def _progress(limits: Limits) -> tuple[Alert, ...]:
    return (
        Alert(
            name="DdpNoFirstStep",
            expr=f"""\
time() - min by ({RUN}) (ddp_job_start_timestamp_seconds) > {limits.first_step:g}
unless on ({RUN}) max by ({RUN}) (ddp_last_step_timestamp_seconds) > 0""",
            hold_s=60,
            severity="warning",
            summary="{{ $labels.job_id }} has taken no step since its start {{ $value | humanizeDuration }} ago",
            description="Its nodes wait for each other, its ranks load or download, or the first collective hangs.",
        ),
        Alert(
            name="DdpStalledStep",
            expr=f"""\
time() - max by ({RUN}) (ddp_last_step_timestamp_seconds > 0) > {limits.stalled_step:g}
unless on ({RUN}) (time() - max by ({RUN}) (ddp_heartbeat_timestamp_seconds) < {limits.stalled_step:g})
and {TRAINING}""",
            hold_s=60,
            severity="critical",
            summary="{{ $labels.job_id }} has taken no step for {{ $value | humanizeDuration }}",
            description="No rank has ended a step or given another sign of life: one hangs and the others wait for it.",
        ),
        Alert(
            name="DdpHeartbeatMissing",
            expr=f"time() - ddp_heartbeat_timestamp_seconds > {limits.heartbeat:g}\nand {TRAINING}",
            hold_s=60,
            severity="warning",
            summary="rank {{ $labels.rank }} on node {{ $labels.node }} of {{ $labels.job_id }} has given no sign of "
            "life for {{ $value | humanizeDuration }}",
            description="Of several silent ranks the one that is silent for longest hangs, and the others wait for it.",
        ),
        Alert(
            name="DdpRanksMissing",
            expr=f"run:ddp_ranks_alive:sum < on ({RUN}) max by ({RUN}) (ddp_world_size_expected)",
            hold_s=180,
            severity="critical",
            summary="{{ $labels.job_id }} runs with {{ $value }} ranks, which are fewer than it should have",
            description="A rank or a node was lost and has not come back.",
        ),
        Alert(
            name="DdpScrapeDown",
            expr='up{job="ddp"} == 0',
            hold_s=120,
            severity="warning",
            summary="node {{ $labels.node }} of {{ $labels.job_id }} does not answer at {{ $labels.instance }}",
            description="The node is gone, its network is, or the run ended and its target was left behind.",
        ),
    )


def _speed(limits: Limits) -> tuple[Alert, ...]:
    return (
        Alert(
            name="DdpStraggler",
            expr=f"""\
bottomk by ({RUN}) (1, ddp_rank_relative_speed_ratio > 0)
and on ({RUN}) (max by ({RUN}) (ddp_straggler_skew_ratio) > {limits.skew:g})""",
            hold_s=300,
            severity="warning",
            summary="rank {{ $labels.rank }} on node {{ $labels.node }} slows {{ $labels.job_id }} down: "
            "{{ $value | humanizePercentage }} of the fastest rank's speed",
            description="Every step takes as long as the slowest rank; its time is counted without waiting for others.",
        ),
        Alert(
            name="DdpDataBound",
            expr=f'run:ddp_step_phase:share5m{{phase="data"}} > {limits.data_share:g}',
            hold_s=600,
            severity="warning",
            summary="{{ $labels.job_id }} spends {{ $value | humanizePercentage }} of its steps waiting for data",
            description="The input is slower than the training.",
        ),
        Alert(
            name="DdpLowGoodput",
            expr=f"""\
run:ddp_productive:ratio1h < {limits.ettr:g}
and on ({RUN}) time() - min by ({RUN}) (ddp_job_start_timestamp_seconds) > 3600""",
            hold_s=900,
            severity="warning",
            summary="{{ $labels.job_id }} trained in {{ $value | humanizePercentage }} of the last hour",
            description="The rest went to starts, restores, checkpoints and evaluation: the dashboard says to which.",
        ),
    )


def _safety(limits: Limits) -> tuple[Alert, ...]:
    return (
        Alert(
            name="DdpCheckpointStale",
            expr=f"run:ddp_checkpoint_age_seconds:min > {limits.checkpoint_age:g}\nand {TRAINING}",
            hold_s=60,
            severity="critical",
            summary="the newest checkpoint of {{ $labels.job_id }} is {{ $value | humanizeDuration }} old",
            description="All that was trained since then is lost if the run ends now.",
        ),
        Alert(
            name="DdpCheckpointFailing",
            expr=f"sum by ({RUN}, op, reason) (increase(ddp_checkpoint_failures_total[15m])) > 0",
            hold_s=0,
            severity="critical",
            summary="{{ $labels.job_id }} could not {{ $labels.op }} a checkpoint: {{ $labels.reason }}",
            description="Until one is written, work that is done can be lost.",
        ),
        Alert(
            name="DdpNonfinite",
            expr=f"sum by ({RUN}, where) (increase(ddp_nonfinite_total[15m])) > 0",
            hold_s=0,
            severity="critical",
            summary="the {{ $labels.where }} of {{ $labels.job_id }} is no number any more",
            description="Training on would spoil the model; ddptrain ends the run, a script of your own may not.",
        ),
        Alert(
            name="DdpRestartStorm",
            expr=f"max by ({RUN}) (sum without (reason) (increase(ddp_restarts_total[1h]))) >= {limits.restarts:g}",
            hold_s=0,
            severity="critical",
            summary="{{ $labels.job_id }} has started again {{ $value | humanize }} times within an hour",
            description="Something fails again and again; each start costs its time and the steps since a checkpoint.",
        ),
    )


def _order(limits: Limits) -> tuple[Alert, ...]:
    return (
        Alert(
            name="DdpMixedVersions",
            expr=f"count by ({RUN}) (count by ({RUN}, version, torch_version) (ddp_build_info)) > 1",
            hold_s=60,
            severity="warning",
            summary="the nodes of {{ $labels.job_id }} run {{ $value }} different versions",
            description="Nodes with different torch or ddpctl may hang in a collective or train something else.",
        ),
        Alert(
            name="DdpClockSkew",
            expr=f"abs(ddp_clock_offset_seconds) > {limits.clock_offset:g}",
            hold_s=60,
            severity="warning",
            summary="node {{ $labels.node }} of {{ $labels.job_id }} has a clock that is "
            "{{ $value | humanizeDuration }} off",
            description="Logs, events and the ages of checkpoints cannot be compared between the nodes.",
        ),
    )
