"""Generates rules, alerts and dashboards for Prometheus and Grafana, and runs both programs in containers.

It uses the metric names in ddpwire's catalogue, and is independent of targets. The ``dashboards`` folder of a checkout
generates ``run.json`` and ``fleet.json`` with Grafana's own SDK, which an installed ddpctl does not need.
"""
