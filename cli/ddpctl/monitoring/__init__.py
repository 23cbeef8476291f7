"""Writes rules, alerts and dashboards for Prometheus and Grafana, and runs both programs in containers.

The metrics are those of ``ddpwire.metrics``. The code in the repository's folder ``dashboards`` generates ``run.json``
and ``fleet.json`` with Grafana's SDK.
"""
