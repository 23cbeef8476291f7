#!/usr/bin/env bash
# Most people expect the client to refuse a second metric whose series would be the same as those of the first, as it
# does for Counter("steps") and Counter("steps_total") with DuplicateTimeseries.
# What happens: since dots are allowed in names (UTF-8 names of Prometheus 3), Gauge("gpu.memory") and
# Gauge("gpu_memory") may both exist. In the text format, dots are written as underscores: the page has the family
# gpu_memory twice, with one series that has two values. The registry itself still tells them apart, so tests that use
# get_sample_value see nothing. Only a scraper that asks for escaping=allow-utf-8 gets two names.
# Version: prometheus_client 0.26.0, promtool of prometheus 2.42.0+ds-5+b5 (Debian 12).
# Source: found by experiment; https://prometheus.io/docs/instrumenting/escaping_schemes/ describes the escaping.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prometheus_client==0.26.0
cd "$folder"
venv/bin/python - <<'END'
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import choose_encoder

print("prometheus_client", version("prometheus_client"))
registry = CollectorRegistry()
Gauge("gpu.memory", "bytes that are reserved", registry=registry).set(1)
Gauge("gpu_memory", "bytes that are used", registry=registry).set(2)
Counter("steps", "steps", registry=registry)
try:
    Counter("steps_total", "steps", registry=registry)
except ValueError as error:
    print("steps and steps_total:", type(error).__name__)
else:
    raise SystemExit("changed: steps and steps_total are accepted")
lines = [line for line in generate_latest(registry).decode().splitlines() if "gpu" in line and line[0] != "#"]
print("the page has", lines)
assert lines == ["gpu_memory 1.0", "gpu_memory 2.0"]
assert [registry.get_sample_value(name) for name in ("gpu.memory", "gpu_memory")] == [1, 2]
encoder, _ = choose_encoder("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8")
names = [line.split()[0] for line in encoder(registry).decode().splitlines() if "gpu" in line and line[0] != "#"]
print("a scraper that allows UTF-8 gets", names)
assert len({*names}) == 2
END
