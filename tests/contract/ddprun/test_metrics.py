"""A node's /metrics: the ranks' series, its own, and where it is registered."""

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from ddprun.system.machine import count_gpus
from ddpwire.metrics import CATALOGUE

OWNER = {"DDP_USER": "ann", "DDP_PROJECT": "vision"}


def test_the_metrics_of_both_ranks_and_over_a_restart(runs):
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "my-run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        node = runs.start("metrics.py", options=options, env={"DDP_METRICS_PORT": str(taken), **OWNER})
        runs.until(lambda: node.log(0).count("ready") == 2 and node.log(1).count("ready") == 1)
    free = node.state().metrics.removesuffix("/metrics").rpartition(":")[2]
    assert f"port {taken}" in node.messages()[0]
    assert free in node.messages()[0]
    with urllib.request.urlopen(node.state().metrics, timeout=5) as answer:  # noqa: S310
        text = answer.read().decode()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert series['ddp_steps_total{rank="0"}'] == "20.0"
    assert series['ddp_steps_total{rank="1"}'] == "20.0"
    assert series['ddp_last_step{rank="0"}'] == "8.0"
    assert series['ddp_last_step{rank="1"}'] == "0.0"
    assert series['my_seconds_bucket{le="2.0",rank="0"}'] == "2.0"
    assert series['ddp_rank_exits_total{cause="sigkill"}'] == "1.0"
    assert series['ddp_rank_exits_total{cause="ok"}'] == "0.0"
    assert series['ddp_job_state{state="training"}'] == "1.0"
    assert series["ddp_world_size"] == "2.0"
    (about,) = (name for name in series if name.startswith("ddp_run_info"))
    uid = node.state().run_uid
    assert re.fullmatch(
        rf'ddp_run_info\{{config_sha256="[0-9a-f]{{12}}",project="vision",run_id="my-run",run_uid="{uid}",user="ann"\}}',
        about,
    )
    assert re.fullmatch("[0-9a-f]{12}", uid)
    assert series["ddp_ranks_done"] == "0.0"
    assert "# HELP ddp_steps_total Optimizer steps taken." in text.splitlines()
    assert [line for line in text.splitlines() if "_created" in line or "pid=" in line] == []
    if Path(PROMTOOL).exists():
        check = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")
    node.process.terminate()
    assert node.end() == 143


PROMTOOL = "/usr/bin/promtool"


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
    catalogue = {metric.name: metric for metric in CATALOGUE if metric.set_by == "ddprun"}
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    with_gpu = count_gpus() > 0
    assert types == {name: metric.kind for name, metric in catalogue.items() if with_gpu or not metric.needs_gpu}
    series = [line for line in text.splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in series}
    assert {name for name, metric in catalogue.items() if metric.at_first and name in types} <= names
    assert len(series) <= 120


def test_a_node_registers_its_metrics_while_it_lives(runs, tmp_path):
    folder = tmp_path / "targets"
    env = {"DDP_TARGETS_DIR": str(folder), "DDP_LAUNCHER": "hand"}
    node = runs.start("act.py", "all=save", options=("--run-id", "a/b"), env=env)
    runs.wait_until_ready(node)
    (path,) = folder.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("a_b.node-0.json", 0o644)
    assert json.loads(path.read_text()) == [
        {"targets": [node.state().metrics.split("/")[2]], "labels": {"job_id": "a/b", "launcher": "hand", "node": "0"}}
    ]
    node.process.terminate()
    assert node.end() == 143
    assert list(folder.iterdir()) == []
    kept = (node.folder / "metrics.prom").read_text()
    assert 'ddp_termination_signals_total{signal="SIGTERM"} 1.0\n' in kept
    assert 'ddp_job_state{state="stopped"} 1.0\n' in kept
    assert 'ddp_rank_exits_total{cause="stopped"} 1.0\n' in kept, "it exited with 143 because of the stop: no error"
