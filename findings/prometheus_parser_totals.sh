#!/usr/bin/env bash
# Most people expect prometheus_client's parser of the text format to return samples under the names that the page has.
# What happens: the type decides about the name. In the text format, unlike in OpenMetrics, a counter may have any
# name, and NVIDIA's dcgm-exporter has the counter DCGM_FI_DEV_PCIE_REPLAY_COUNTER. The parser appends _total to such
# names: a lookup by the real name finds nothing, and a proxy that parses pages and writes them again renames the
# series. Without the TYPE line, the name stays. If another metric is really called NAME_total, there are two values
# under one name. Nothing is reported.
# Version: prometheus_client 0.26.0.
# Source: found by experiment; build_metric in prometheus_client/parser.py. The counter is in dcgm-exporter's
# default-counters.csv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prometheus_client==0.26.0
cd "$folder"
cat >page <<'END'
# HELP DCGM_FI_DEV_PCIE_REPLAY_COUNTER PCIe retries.
# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER counter
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{gpu="0"} 3
END
cat >parse.py <<'END'
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

page = Path("page").read_text()


def samples(text: str) -> list[tuple[str, float]]:
    return [(sample.name, sample.value) for family in text_string_to_metric_families(text) for sample in family.samples]


class Proxy(Collector):
    def collect(self) -> Iterable[Metric]:
        return text_string_to_metric_families(page)


print("prometheus_client", importlib.metadata.version("prometheus_client"))
print("counter:", samples(page))
print("gauge:", samples(page.replace(" counter", " gauge")))
print("without TYPE:", samples(page.splitlines()[-1] + "\n"))
print("two metrics:", samples("# TYPE a counter\na 1\n# TYPE a_total counter\na_total 2\n"))
registry = CollectorRegistry()
registry.register(Proxy())
print("written again:", generate_latest(registry).decode().splitlines()[-1])
END
venv/bin/python parse.py | tee seen
diff seen - <<'END'
prometheus_client 0.26.0
counter: [('DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total', 3)]
gauge: [('DCGM_FI_DEV_PCIE_REPLAY_COUNTER', 3)]
without TYPE: [('DCGM_FI_DEV_PCIE_REPLAY_COUNTER', 3)]
two metrics: [('a_total', 1), ('a_total', 2)]
written again: DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total{gpu="0"} 3.0
END
