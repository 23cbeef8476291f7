"""Makes rules, alerts and dashboards for Prometheus and Grafana, and runs both in containers.

It uses the metric names of ddpwire's catalogue, and depends on no target. The ``dashboards`` folder of a checkout
generates ``run.json`` and ``fleet.json`` with Grafana's own SDK, which an installed ddpctl does not need.
"""
