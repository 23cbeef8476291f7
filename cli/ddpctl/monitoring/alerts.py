"""The limits of the alerts, and the rule files for Prometheus. docs/alerts.md explains each alert.

``rules.yaml`` has the recording rules and the alerts. It is a jinja2 template, in which only the limits vary. Its
delimiters are << and >>, because Prometheus' own templates have {{ and }}.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Annotated

from annotated_types import Ge, Le

from ddpctl.errors import UsageError
from ddpctl.job.spec import Doc, fields_of
from ddpctl.text import quote, unknown

DAYS = 30 * 86400  # the largest limit, because a later alert does not help
LOOKBACK_S = 300.0  # for how long Prometheus uses a sample as the current one


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
