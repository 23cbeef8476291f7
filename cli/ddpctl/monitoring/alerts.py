"""Recording rules and alerts for Prometheus, and the limits that users can set. docs/alerts.md explains each alert."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le

from ddpctl.errors import UsageError
from ddpctl.job.spec import Doc, fields_of
from ddpctl.text import quote, unknown

DAYS = 30 * 86400  # the largest limit, because a later alert does not help
# The labels that identify a run and its owner. Two runs may have the same name (job_id), but not the same run_uid. Only
# Kubernetes has a namespace. Of the series of a node, only ddp_run_info has the labels in IDENTITY.
IDENTITY = "run_uid, user, project"
RUN = f"namespace, job_id, {IDENTITY}"
NODE = "namespace, job_id, instance"
LOOKBACK_S = 300.0  # for how long Prometheus uses a sample as the current one
RUNBOOKS = "https://github.com/ddpctl/ddpctl/blob/main/docs/alerts.md"
RULES_HEAD = (
    "# Made by ddpctl monitor. It overwrites your edits: change limits with --limit. docs/alerts.md of ddpctl explains "
    "each alert, and what to do.\n"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits at which the alerts fire."""

    hold: Annotated[
        float | None, Doc("Seconds for which a condition must hold before its alert fires."), Ge(0), Le(86400)
    ] = None
    first_step: Annotated[float, Doc("Seconds from the start to the first step."), Ge(1), Le(DAYS)] = 900.0
    stalled_step: Annotated[float, Doc("Seconds without a step, after the first step."), Ge(1), Le(DAYS)] = 180.0
    heartbeat: Annotated[float, Doc("Seconds without a heartbeat from a rank."), Ge(1), Le(DAYS)] = 180.0
    skew: Annotated[float, Doc("The slowest rank's own step time, divided by the median."), Ge(1), Le(100)] = 1.25
    data_share: Annotated[float, Doc("Share of the step time that is spent waiting for data."), Ge(0), Le(1)] = 0.3
    checkpoint_age: Annotated[float, Doc("Seconds since the last checkpoint, or since the start."), Ge(1), Le(DAYS)] = (
        3600.0
    )
    restarts: Annotated[float, Doc("Restarts within an hour."), Ge(1), Le(1000)] = 3.0
    ettr: Annotated[float, Doc("Share of the last hour in which steps were taken."), Ge(0), Le(1)] = 0.8
    clock_offset: Annotated[float, Doc("Seconds between a node's clock and node 0's."), Ge(0), Le(86400)] = 1.0


def parse_limits(settings: Iterable[str]) -> Limits:
    """Parse limits such as ``checkpoint_age=7200``. Raises UsageError."""
    known = fields_of(Limits)
    given: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in known:
            raise UsageError(f"--limit: {unknown(name, 'limit', tuple(known))}")
        field = known[name]
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not equals or not field.low <= value <= field.high:  # also refuses NaN
            raise UsageError(f"--limit {name}: {quote(text)} is not allowed: expected a number, {field.bounds}")
        given[name] = value
    return Limits(**given)


# Recording rules for the expressions that dashboards and alerts use repeatedly. Their names have the form that the
# Prometheus manual recommends, level:metric:operation. Series with the same RUN labels belong to one run.


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording rule. ``help`` is its comment in the file."""

    name: str
    expr: str
    help: str


# If Prometheus has two series of the same node, a join without topk fails, and the rule gives no result for any run.
RUN_OF_NODE = Recording(
    name="instance:ddp_run_info:topk1",
    expr=f"topk by ({NODE}) (1, ddp_run_info)",
    help="Which run a node belongs to, and which user launched the run.",
)


def with_run(series: str) -> str:
    """Return an expression that adds the labels in IDENTITY to a series.

    If ``series`` is a comparison, it must be in parentheses.
    """
    return f"({series} * on ({NODE}) group_left ({IDENTITY}) {RUN_OF_NODE.name})"


def by_run(operation: str, series: str, *, keep: str = "") -> str:
    """Return an expression that aggregates the series of nodes or ranks by run and by the labels ``keep``."""
    return f"{operation} by ({RUN}{keep and f', {keep}'}) {with_run(series)}"


def share(part: str, whole: str, *, keep: str = "") -> str:
    """Return an expression that divides the rate of ``part`` by the rate of ``whole``, for each run.

    The rates are over five minutes. The rate of ``part`` is also grouped by the labels ``keep``.
    """
    of = f"{by_run('sum', f'rate({part}[5m])', keep=keep)}\n/"
    return f"{of}{keep and f' ignoring ({keep}) group_left ()'}\n{by_run('sum', f'rate({whole}[5m])')}"


def _productive_share(series: str) -> str:
    """Return an expression for the share of productive seconds. In ``series``, {} stands for the name of a counter."""
    counters = ("ddp_productive_seconds_total", "ddp_unproductive_seconds_total")
    productive, unproductive = (by_run("sum", series.format(counter)) for counter in counters)
    return f"{productive}\n/\n(\n  {productive}\n  + {unproductive}\n)"


STEPS = Recording(
    name="run:ddp_steps:rate5m",
    expr=by_run("max", "rate(ddp_steps_total[5m])"),
    help="Optimizer steps per second, over the last five minutes. Too low in the first five minutes of a run.",
)
SAMPLES = Recording(
    name="run:ddp_samples:rate5m",
    expr=by_run("sum", "rate(ddp_samples_total[5m])"),
    help="Training samples per second, over all ranks. Too low in the first five minutes of a run.",
)
STEP_SECONDS = Recording(
    name="run:ddp_step_duration_seconds:mean5m",
    expr=share("ddp_step_duration_seconds_sum", "ddp_step_duration_seconds_count"),
    help="Mean time of a step.",
)
PHASES = Recording(
    name="run:ddp_step_phase:share5m",
    expr=share("ddp_step_phase_seconds_total", "ddp_step_phase_seconds_total", keep="phase"),
    help="Share of the steps' time by phase, 0 to 1.",
)
PRODUCTIVE = Recording(
    name="run:ddp_productive:ratio",
    expr=_productive_share("{}"),
    help="Effective training time ratio since the start: productive / (productive + unproductive) seconds.",
)
PRODUCTIVE_LATELY = Recording(
    name="run:ddp_productive:ratio1h",
    expr=_productive_share("rate({}[1h])"),
    help="Effective training time ratio over the last hour.",
)
CHECKPOINT_AGE = Recording(
    name="run:ddp_checkpoint_age_seconds:min",
    expr=f"""\
time()
- {by_run("max", "(ddp_checkpoint_last_success_timestamp_seconds or ddp_job_start_timestamp_seconds)")}
and on ({RUN}) {with_run("ddp_checkpoint_last_success_timestamp_seconds")}""",
    help="Seconds since the newest complete checkpoint or the start, whichever is later.",
)
RANKS_ALIVE = Recording(
    name="run:ddp_ranks_alive:sum",
    expr=by_run("sum", "ddp_ranks_alive"),
    help="Ranks that are running, over all nodes.",
)
MODEL_FLOPS = Recording(
    name="run:ddp_model_flops:rate5m",
    expr=by_run("sum", "rate(ddp_model_flops_total[5m])"),
    help="The model's FLOPs per second, over all ranks. Divide by the GPUs' peak to get the utilization. "
    "Too low in the first five minutes of a run.",
)
TRAINING = Recording(
    name="run:ddp_training:max",
    expr=by_run("max", 'ddp_job_state{state="training"}'),
    help="1 while at least one node of the run is in the state `training`.",
)
RECORDINGS: tuple[Recording, ...] = tuple(value for value in globals().values() if isinstance(value, Recording))


# Alerts. The severity is critical if a run makes no progress or may lose work. It is warning if a run is slower or less
# safe than it should be.


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alerting rule. ``summary`` and ``description`` are Prometheus templates."""

    name: str
    expr: str
    hold_s: float
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """The URL of the alert's paragraph in docs/alerts.md."""
        return f"{RUNBOOKS}#{self.name.lower()}"


critical, warning = partial(Alert, severity="critical"), partial(Alert, severity="warning")


def alerts(limits: Limits) -> tuple[Alert, ...]:
    """Return all alerts with the given limits."""
    return (*_progress(limits), *_speed(limits), *_safety(limits), *_order(limits))


def _progress(limits: Limits) -> tuple[Alert, ...]:
    lately = promql_duration(max(limits.first_step, LOOKBACK_S))
    since_start = f"time() - {by_run('min', 'ddp_job_start_timestamp_seconds')}"
    return (
        # A script may never report a step, so the alert fires only in three cases. The run has productive seconds,
        # which ddptrain reports before its first step. Or the run reported steps before a restart. Or no rank started.
        warning(
            name="DdpNoFirstStep",
            expr=f"""\
{since_start} > {limits.first_step:g}
unless on ({RUN}) {by_run("max", f"max_over_time(ddp_last_step_timestamp_seconds[{lately}])")} > 0
and on ({RUN}) (
  {by_run("max", "ddp_productive_seconds_total")}
  or {by_run("max", "ddp_steps_total")} > 0
  or {by_run("max", f'max_over_time(ddp_job_state{{state="training"}}[{lately}])')} == 0
)""",
            hold_s=60,
            summary="{{ $labels.job_id }}, started {{ $value | humanizeDuration }} ago, waits for its first step, or "
            "for the first after a restart",
            description="Its nodes wait for each other, its ranks load or download, or the first collective hangs.",
        ),
        critical(
            name="DdpStalledStep",
            expr=f"""\
time() - {by_run("max", "(ddp_last_step_timestamp_seconds > 0)")} > {limits.stalled_step:g}
unless on ({RUN}) (time() - {by_run("max", "ddp_heartbeat_timestamp_seconds")} < {limits.stalled_step:g})
and on ({RUN}) {TRAINING.name} == 1""",
            hold_s=60,
            summary="{{ $labels.job_id }} has taken no step for {{ $value | humanizeDuration }}",
            description="No rank has ended a step or sent another heartbeat: a rank hangs, and the others wait for it.",
        ),
        warning(
            name="DdpHeartbeatMissing",
            expr=f"""\
time() - {with_run("ddp_heartbeat_timestamp_seconds")} > {limits.heartbeat:g}
and on ({RUN}) {TRAINING.name} == 1""",
            hold_s=60,
            summary="rank {{ $labels.rank }} on node {{ $labels.node }} of {{ $labels.job_id }} has sent no "
            "heartbeat for {{ $value | humanizeDuration }}",
            description="If several ranks are silent, the one with the oldest heartbeat hangs, "
            "and the others wait for it.",
        ),
        critical(
            name="DdpRanksMissing",
            expr=f"""\
{by_run("max", "ddp_world_size_expected")}
- {by_run("sum", "ddp_ranks_alive")}
- {by_run("sum", "ddp_ranks_done")} > 0
and on ({RUN}) {by_run("max", "ddp_world_size")} > 0""",
            hold_s=180,
            summary="{{ $labels.job_id }} lacks {{ $value }} of its ranks",
            description="A rank or a node was lost and has not come back.",
        ),
        warning(
            name="DdpScrapeDown",
            expr='up{job="ddp"} == 0',
            hold_s=120,
            summary="node {{ $labels.node }} of {{ $labels.job_id }} does not answer at {{ $labels.instance }}",
            description="The node or its network failed, or the run has ended but its targets file still exists.",
        ),
    )


def _speed(limits: Limits) -> tuple[Alert, ...]:
    return (
        warning(
            name="DdpStraggler",
            expr=f"""\
bottomk by ({RUN}) (1, {with_run("(ddp_rank_relative_speed_ratio > 0)")})
and on ({RUN}) {by_run("max", "ddp_straggler_skew_ratio")} > {limits.skew:g}""",
            hold_s=300,
            summary="rank {{ $labels.rank }} on node {{ $labels.node }} slows {{ $labels.job_id }} down: "
            "{{ $value | humanizePercentage }} of the fastest rank's speed",
            description="Every step takes as long as the slowest rank. "
            "Waiting for other ranks is not counted in a rank's time.",
        ),
        warning(
            name="DdpDataBound",
            expr=f'run:ddp_step_phase:share5m{{phase="data"}} > {limits.data_share:g}',
            hold_s=600,
            summary="{{ $labels.job_id }} spends {{ $value | humanizePercentage }} of its steps waiting for data",
            description="The input is slower than the training.",
        ),
        warning(
            name="DdpLowGoodput",
            expr=f"""\
run:ddp_productive:ratio1h < {limits.ettr:g}
and on ({RUN}) time() - {by_run("min", "ddp_job_start_timestamp_seconds")} > 3600""",
            hold_s=900,
            summary="{{ $labels.job_id }} trained in {{ $value | humanizePercentage }} of the last hour",
            description="The rest went to starts, restores, checkpoints and evaluation. "
            "The dashboard shows how much each took.",
        ),
    )


def _safety(limits: Limits) -> tuple[Alert, ...]:
    return (
        critical(
            name="DdpCheckpointStale",
            expr=f"run:ddp_checkpoint_age_seconds:min > {limits.checkpoint_age:g}\nand on ({RUN}) {TRAINING.name} == 1",
            hold_s=60,
            summary="the newest checkpoint of {{ $labels.job_id }} is {{ $value | humanizeDuration }} old",
            description="If the run ends now, the steps since then are lost.",
        ),
        critical(
            name="DdpCheckpointFailing",
            expr=f"{by_run('sum', 'increase(ddp_checkpoint_failures_total[15m])', keep='op, reason')} > 0",
            hold_s=0,
            summary="{{ $labels.job_id }} could not {{ $labels.op }} a checkpoint: {{ $labels.reason }}",
            description="If the run ends before a checkpoint is written, the steps since the last one are lost.",
        ),
        critical(
            name="DdpNonfinite",
            expr=f"{by_run('sum', 'increase(ddp_nonfinite_total[15m])', keep='where')} > 0",
            hold_s=0,
            summary="the {{ $labels.where }} of {{ $labels.job_id }} is not finite any more",
            description="If the training continues, its weights become NaN. "
            "ddptrain ends the run, but your own script may not.",
        ),
        critical(
            name="DdpRestartStorm",
            expr=f"{by_run('max', 'sum without (reason) (increase(ddp_restarts_total[1h]))')} >= {limits.restarts:g}",
            hold_s=0,
            summary="{{ $labels.job_id }} has started again {{ $value | humanize }} times within an hour",
            description="The run fails repeatedly. "
            "Each restart takes time and loses the steps since the last checkpoint.",
        ),
    )


def _order(limits: Limits) -> tuple[Alert, ...]:
    return (
        warning(
            name="DdpMixedVersions",
            expr=f"count by ({RUN}) ({by_run('count', 'ddp_build_info', keep='version, torch_version')}) > 1",
            hold_s=60,
            summary="the nodes of {{ $labels.job_id }} run {{ $value }} different versions",
            description="Nodes with different torch or ddpctl may hang in a collective or train something else.",
        ),
        warning(
            name="DdpClockSkew",
            expr=f"abs({with_run('ddp_clock_offset_seconds')}) > {limits.clock_offset:g}",
            hold_s=60,
            summary="node {{ $labels.node }} of {{ $labels.job_id }} has a clock that is "
            "{{ $value | humanizeDuration }} off",
            description="Logs, events and the ages of checkpoints cannot be compared between the nodes.",
        ),
    )


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes strings of several lines as block scalars."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump_yaml(value: Any) -> str:
    """Return a value as YAML. The keys keep their order, and long strings stay on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def promql_duration(seconds: float) -> str:
    """Format a duration for Prometheus: whole seconds as seconds, and other durations as milliseconds."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"


def rule_groups(limits: Limits) -> str:
    """Return the text of a rule file for Prometheus. All rules are in one group, so they are evaluated in order."""
    text = f"{RULES_HEAD}groups:\n- name: ddp\n  rules:\n"
    for one in RECORDINGS:
        text += f"  # {one.help}\n" + _entry({"record": one.name, "expr": one.expr})
    return text + "".join(_entry(alert_rule(one, limits)) for one in alerts(limits))


def prometheus_rule(limits: Limits) -> str:
    """Return the rules as a PrometheusRule, the format of the Prometheus Operator."""
    spec = textwrap.indent(rule_groups(limits).removeprefix(RULES_HEAD), "  ")
    return f"""\
{RULES_HEAD}apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ddpctl
  # Labels that your Prometheus selects (ruleSelector). For kube-prometheus-stack, the name of its Helm release:
  # labels: {{release: kube-prometheus-stack}}
spec:
{spec}"""


def alert_rule(rule: Alert, limits: Limits) -> dict[str, Any]:
    """Return an alert in the format of a Prometheus rule."""
    hold_s = rule.hold_s if limits.hold is None else limits.hold
    return {
        "alert": rule.name,
        "expr": rule.expr,
        **({"for": promql_duration(hold_s)} if hold_s else {}),
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook},
    }


def _entry(rule: dict[str, Any]) -> str:
    return textwrap.indent(dump_yaml([rule]), "  ")
