"""Reads the rules, and PromQL: whether an expression asks only for series and label values that a program sets."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml

from ddpctl.monitoring.prometheus import Limits, rule_groups
from ddpwire.metrics import CATALOGUE


@dataclass(frozen=True)
class Rule:
    """A recording rule or an alert. ``help`` is the first line of its comment."""

    name: str
    expr: str
    help: str
    severity: str
    description: str
    runbook: str


def rules(limits: Limits) -> list[Rule]:
    """Return the rules of the rule file, in its order."""
    text = rule_groups(limits)
    comments = re.findall(r"(?m)^  # (.*)\n(?:  # .*\n)*  - record: (\S+)$", text)
    help_of = {name: comment for comment, name in comments}
    (group,) = yaml.safe_load(text)["groups"]
    return [
        Rule(
            name=rule.get("record") or rule["alert"],
            expr=rule["expr"],
            help=help_of.get(rule.get("record"), ""),
            severity=rule.get("labels", {}).get("severity", ""),
            description=rule.get("annotations", {}).get("description", ""),
            runbook=rule.get("annotations", {}).get("runbook_url", ""),
        )
        for rule in group["rules"]
    ]


RECORDINGS = [rule for rule in rules(Limits()) if not rule.severity]
ALERTS = {rule.name: rule for rule in rules(Limits()) if rule.severity}
OF_A_RUN: dict[str, tuple[str, ...]] = {"run_uid": (), "user": (), "project": ()}
FROM_TARGETS = {"job", "instance", "node", "job_id", "namespace", "launcher"}
# Prometheus' own, and what the rules make of the catalogue.
OTHERS = {
    "up": {},
    "ALERTS": {"alertname": (), "alertstate": ("firing", "pending"), "severity": ("critical", "warning"), **OF_A_RUN},
    **{rule.name: OF_A_RUN | ({"phase": ()} if "phase" in rule.name else {}) for rule in RECORDINGS},
}


def known() -> dict[str, dict[str, tuple[str, ...]]]:
    """Every series that can be asked for, and its labels' values."""
    labels_of: dict[str, dict[str, tuple[str, ...]]] = dict(OTHERS)
    for metric in CATALOGUE:
        labels = metric.labels | ({"rank": ()} if metric.set_by == "ddptrain" else {})
        for suffix in ("_sum", "_count", "_bucket") if metric.kind == "histogram" else ("",):
            labels_of[metric.name + suffix] = labels
    return labels_of


def plain(expr: str, uid: str | None = None) -> str:
    """An expression of a dashboard with Grafana's variables filled in; ``uid``: of the run; None: of any."""
    expr = re.sub(r"\$__(rate_interval|range)\b", "5m", expr)
    expr = expr.replace('run_uid="$run_uid"', 'run_uid=~".*"' if uid is None else f'run_uid="{uid}"')
    expr = expr.replace("$run_uid|", ".*" if uid is None else f"{uid}|")
    return expr.replace("$namespace", ".*").replace("$peak", "989").replace("$run", "night")


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector inside."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "args", "param", "vector_selector"):
        inner = getattr(node, name, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if part is not None and not isinstance(part, (str, float, int)):
                yield from selectors(part)


def names(expr: str) -> set[str]:
    """The series that the expression asks for."""
    return {str(selector.name) for selector in selectors(promql_parser.parse(plain(expr)))}


def selectors_of(expr: str) -> list[str]:
    """The selectors inside, without their windows, as they can be asked for by themselves."""
    return [selector.prettify() for selector in selectors(promql_parser.parse(plain(expr)))]


def faults(expr: str) -> list[str]:
    """What the expression asks for and nobody sets."""
    series = known()
    errors = []
    for selector in selectors(promql_parser.parse(plain(expr))):
        if selector.name not in series:
            errors.append(f"no series {selector.name}")
            continue
        for matcher in selector.matchers.matchers:
            if matcher.name in FROM_TARGETS:
                continue
            values = series[selector.name].get(matcher.name)
            if values is None:
                errors.append(f"{selector.name} has no label {matcher.name}")
            elif values and not set(matcher.value.split("|")) <= set(values):
                errors.append(f"{selector.name}: {matcher.name} is never {matcher.value}")
    return errors
