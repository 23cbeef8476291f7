"""Launches on Kubernetes that are interrupted at many moments; ranks of real ddpruns in pods."""

import json
import os
import random
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from bench.measuring import runtime_files
from tests import forks
from tests.contract.ddpctl import test_kubernetes
from tests.contract.ddpctl.conftest import world as world
from tests.contract.ddpctl.test_kubernetes import DETACHED, interrupt
from tests.contract.ddpctl.test_kubernetes import cluster as cluster
from tests.contract.ddpctl.test_kubernetes import still as still
from tests.contract.ddpctl.worlds import Kubernetes, World
from tests.nightly.ddpctl.test_profile import check_chrome_trace

from ddpctl.commands import explain

ROOT = Path(__file__).parents[3]
ANSWER_S = explain.ANSWER_S  # before the world of contract makes it shorter


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_of_a_launch_interrupted_at_any_call(still: Kubernetes, seed: int) -> None:
    choose = random.Random(seed)
    call, edge = choose.randint(1, 11), choose.choice(("begin", "end"))
    number = choose.choice(("KILL", "KILL", "INT", "TERM"))
    code = interrupt(still, *DETACHED, "--", "train.py", call=call, edge=edge, number=number)
    assert code == {"KILL": -9, "INT": 130, "TERM": 143}[number], (call, edge, number)
    (still.cluster / "view").write_text("{}")  # kubectl's own context is another by now
    known = (still.runs / "night/run.json").exists()  # else it was killed before it made anything
    stopped = still.ddpctl("stop", "night")
    assert stopped.returncode == (0 if known else 66), stopped.stderr
    assert still.objects() == []


def test_ranks_in_pods_are_explained_and_profiled(
    world: Callable[[str], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods' commands reach the folder of two real ddpruns, whose rank 1 sleeps while the others wait."""
    monkeypatch.setattr(explain, "ANSWER_S", ANSWER_S)
    site = cast(Kubernetes, world("kubernetes"))
    (site.cluster / "state").write_text("running")
    settings = json.loads((site.folder / "ddpctl.yaml").read_text())
    settings["job"] |= {"gpus": 2}
    (site.folder / "ddpctl.yaml").write_text(json.dumps(settings))
    assert site.launch("wait").returncode == 0
    folder = site.cluster / "disk/night"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    hang = (str(ROOT / "bench/explain_cases/cases.py"), "sleeps")
    ddprun, quiet = ("-m", "ddprun", *options), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nodes = [
        forks.start([*ddprun, f"--node-rank={node}", f"--run-dir={folder}", *hang], env=os.environ, **quiet)
        for node in (0, 1)
    ]
    explanation: dict[str, object] = {}

    def explained() -> bool:
        explanation.update(json.loads(site.ddpctl("explain", "night", "--json").stdout or "{}"))
        return explanation.get("cause") == "missing"

    try:
        site.wait_for(lambda: len(runtime_files(folder, "heartbeat/rank-*.group")) == 4, timeout_s=200)
        site.wait_for(explained, timeout_s=200)
        assert (explanation["rank"], explanation["node"], explanation["unknown"]) == (1, 0, [])
        profile = site.json("profile", "night", "--seconds", "1", "-o", str(tmp_path / "trace.json.gz"))
        assert (profile["slowest"], profile["unknown"], sorted(profile["shares"])) == (1, [], ["0", "1", "2", "3"])
        check_chrome_trace((tmp_path / "trace.json.gz").read_bytes())
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)


def test_a_log_follower_ends_with_its_terminal(still: Kubernetes) -> None:
    test_kubernetes.test_a_log_follower_ends_with_its_ddpctl(still, "HUP", 143)
