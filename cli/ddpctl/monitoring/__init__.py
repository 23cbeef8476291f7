"""Writes rules, alerts and dashboards for Prometheus and Grafana, and runs both programs in containers.

The metrics are those of ``ddpwire.metrics``. ``run.json`` and ``fleet.json`` are the dashboards.
"""
