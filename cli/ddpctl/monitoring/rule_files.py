"""Rules and alerts as the file that Prometheus reads, and as the PrometheusRule of its Kubernetes operator."""

import textwrap
from typing import Any

import yaml

from ddpctl.monitoring.alerts import Alert, alerts
from ddpctl.monitoring.limits import Limits
from ddpctl.monitoring.rules import RECORDINGS, Recording

HEAD = "# Made by ddpctl monitor. What each alert means and what to do: docs/alerts.md of ddpctl.\n"


class _Dumper(yaml.SafeDumper):
    """Several lines as several lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    """YAML for a reader: keys in their order, long lines whole."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def span(seconds: float) -> str:
    """As Prometheus writes durations: in whole numbers."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"


def groups(limits: Limits) -> str:
    """The file for Prometheus' ``rule_files``: one group, whose rules are worked out in their order."""
    text = f"{HEAD}groups:\n- name: ddp\n  rules:\n"
    text += "".join(f"  # {one.help}\n{_entry(recording(one))}" for one in RECORDINGS)
    return text + "".join(_entry(alert(one, limits)) for one in alerts(limits))


def prometheus_rule(limits: Limits) -> str:
    """The same for the Prometheus Operator."""
    spec = textwrap.indent(groups(limits).removeprefix(HEAD), "  ")
    return f"""\
{HEAD}apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ddpctl
  # What your Prometheus selects (its ruleSelector); with kube-prometheus-stack the name of its Helm release:
  # labels: {{release: kube-prometheus-stack}}
spec:
{spec}"""


def recording(rule: Recording) -> dict[str, Any]:
    """A recording rule in Prometheus' words."""
    return {"record": rule.name, "expr": rule.expr}


def alert(rule: Alert, limits: Limits) -> dict[str, Any]:
    """An alert in Prometheus' words."""
    hold_s = rule.hold_s if limits.hold is None else limits.hold
    return {
        "alert": rule.name,
        "expr": rule.expr,
        **({"for": span(hold_s)} if hold_s else {}),
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description, "runbook_url": rule.runbook},
    }


def _entry(rule: dict[str, Any]) -> str:
    return textwrap.indent(dump([rule]), "  ")
