"""What Prometheus and Grafana are given: rules, alerts, dashboards, and the stack that runs both in containers.

Knows the catalogue's names (ddpwire) and no target. ``run.json`` and ``fleet.json`` are made by the checkout's
``dashboards`` with Grafana's own SDK, which no installation of ddpctl needs.
"""
