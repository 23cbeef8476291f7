"""The limits of the alerts, and the rule files for Prometheus. docs/alerts.md explains each alert.

``rules.yaml`` has the recording rules and the alerts. It is a jinja2 template, in which only the limits vary. Its
delimiters are << and >>, because Prometheus' own templates have {{ and }}.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Annotated

from ddpctl.errors import UsageError
from ddpctl.job.schema import validate
from ddpctl.job.values import Options, between

DAYS = 30 * 86400  # the largest limit, because a later alert does not help
LOOKBACK_S = 300.0  # for how long Prometheus uses a sample as the current one


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """The limits at which the alerts fire."""

    hold: Annotated[float, between(0, 86400)] | None = None
    """Seconds for which a condition must hold before its alert fires."""
    first_step: Annotated[float, between(1, DAYS)] = 900.0
    """Seconds from the start to the first step."""
    stalled_step: Annotated[float, between(1, DAYS)] = 180.0
    """Seconds without a step, after the first step."""
    heartbeat: Annotated[float, between(1, DAYS)] = 180.0
    """Seconds without a heartbeat from a rank."""
    skew: Annotated[float, between(1, 100)] = 1.25
    """The slowest rank's own step time, divided by the median."""
    data_share: Annotated[float, between(0, 1)] = 0.3
    """Share of the step time that is spent waiting for data."""
    checkpoint_age: Annotated[float, between(1, DAYS)] = 3600.0
    """Seconds since the last checkpoint, or since the start."""
    restarts: Annotated[float, between(1, 1000)] = 3.0
    """Restarts within an hour."""
    ettr: Annotated[float, between(0, 1)] = 0.8
    """Share of the last hour in which steps were taken."""
    clock_offset: Annotated[float, between(0, 86400)] = 1.0
    """Seconds between a node's clock and node 0's."""


def parse_limits(settings: Iterable[str]) -> Limits:
    """Parse limits such as ``checkpoint_age=7200``. Raises UsageError."""
    given = {name: text for name, _, text in (setting.partition("=") for setting in settings)}
    values, problems = validate(Limits, given, what="the alerts")
    for problem in problems:
        raise UsageError(f"--limit{' ' * bool(problem.field)}{problem.field}: {problem.text}")
    return Limits(**values)


def rule_groups(limits: Limits) -> str:
    """Return the text of a rule file for Prometheus. All rules are in one group, so they are evaluated in order."""
    from jinja2 import StrictUndefined, Template

    template = Template(
        (resources.files("ddpctl.monitoring") / "rules.yaml").read_text(),
        variable_start_string="<<",
        variable_end_string=">>",
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    numbers = {name: f"{value:g}" for name, value in asdict(limits).items() if value is not None}

    def hold(seconds: float) -> str:
        return promql_duration(seconds if limits.hold is None else limits.hold)

    lookback = promql_duration(max(limits.first_step, LOOKBACK_S))
    return str(template.render({**numbers, "hold": hold, "lookback": lookback}))


def prometheus_rule(limits: Limits) -> str:
    """Return the rules as a PrometheusRule, the format of the Prometheus Operator."""
    head, groups = rule_groups(limits).split("\n", 1)
    return f"""\
{head}
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ddpctl
  # Labels that your Prometheus selects (ruleSelector). For kube-prometheus-stack, the name of its Helm release:
  # labels: {{release: kube-prometheus-stack}}
spec:
{textwrap.indent(groups, "  ")}"""


def promql_duration(seconds: float) -> str:
    """Format a duration for Prometheus: whole seconds as seconds, and other durations as milliseconds."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"
