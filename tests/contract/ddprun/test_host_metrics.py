"""What a node tells of its machine, and that it tells all that the catalogue says."""

import re
import socket
import urllib.parse
import urllib.request
from typing import Any

from ddprun.machine import count_gpus
from ddpwire.metrics import CATALOGUE


def test_one_rank_exports_all_of_the_catalogue_that_is_the_nodes(runs: Any) -> None:
    """Also where its port is taken, and beside a scraper that hangs: no training fails for its metrics."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {"DDP_METRICS_HOST": "127.0.0.1", "DDP_METRICS_PORT": str(port)}
        node = runs.start("act.py", "all=save", env=environ)
        runs.wait_until_ready(node)
        place = urllib.parse.urlparse(node.state().metrics)
        assert place.port not in (None, port)
        with socket.create_connection((place.hostname, place.port)) as hanging:
            hanging.send(b"GET /metrics HTTP/1.1\r\n")  # and no more
            with urllib.request.urlopen(node.state().metrics, timeout=30) as answer:  # noqa: S310
                text = answer.read().decode()
            node.process.terminate()
            assert node.end() == 143
    told = {metric.name: metric for metric in CATALOGUE if metric.set_by == "ddprun"}
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    with_gpu = count_gpus() > 0
    assert types == {name: metric.kind for name, metric in told.items() if with_gpu or not metric.needs_gpu}
    series = [line for line in text.splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in series}
    assert {name for name, metric in told.items() if metric.at_first and name in types} <= names
    assert len(series) <= 120
