"""What Prometheus and Grafana are given: rules, alerts, dashboards and the configuration around them, as texts. Pure.

Knows the catalogue's names (ddpwire) and neither runs nor targets. ``run.json`` and ``fleet.json`` are made by the
checkout's ``dashboards`` with Grafana's own SDK, which no installation of ddpctl needs.
"""
