"""What a cluster with the Prometheus Operator and Grafana's dashboard sidecar is given: manifests, as texts."""

import textwrap

from ddpctl.monitoring.stack import DASHBOARDS, dashboard


def dashboards() -> str:
    """A ConfigMap a dashboard, which Grafana's sidecar finds by its label (grafana_dashboard: '1', its default)."""
    return "---\n".join(_config_map(name) for name in DASHBOARDS)


def _config_map(name: str) -> str:
    return f"""\
# Made by ddpctl monitor. In the namespace that Grafana's sidecar watches.
apiVersion: v1
kind: ConfigMap
metadata:
  name: ddpctl-dashboard-{name}
  labels:
    grafana_dashboard: '1'
data:
  ddpctl-{name}.json: |
{textwrap.indent(dashboard(name), "    ")}"""
