"""Hosts that several runs share, and hosts that come and go: real sshds, GPUs stood in by device nodes. Needs root."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cluster.ssh_cluster import Lab, cluster
from tests.cluster.ssh_lab import ROOT_MISSING
from tests.e2e.driver import PACED, wait_until

from ddpwire.run_files import NodeState, read_node

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
HOLD = """\
import os, pathlib, time
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
end = pathlib.Path.home() / "end" / os.environ["DDP_RUN_ID"]
while not end.exists():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("hosts"), boxes_wanted=4, gpus=4) as made:
        yield made


@pytest.fixture
def lab(built: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("PATH", built.variables["PATH"])
    for box in built.boxes:
        (box.home / "hold.py").write_text(HOLD)
        (box.home / "end").mkdir(exist_ok=True)
    yield built
    built.ddpctl("stop", "--all", "--kill")
    shutil.rmtree(built.folder / "runs", ignore_errors=True)


def write(lab: Lab, *boxes: int, job: str, options: str = "") -> None:
    lab.write(hosts=f"[{', '.join(lab.boxes[number].address for number in boxes)}]", options=options)
    file = lab.folder / "ddpctl.yaml"
    file.write_text(re.sub(r"(?m)^job: .*$", f"job: {{{job}}}", file.read_text()))


def holders(lab: Lab) -> dict[str, tuple[str | None, ...]]:
    """Of each host who has its GPUs."""
    done = lab.ddpctl("hosts", "--json")
    assert done.returncode == 0, done.stderr
    return {host["host"]: tuple(gpu["run"] for gpu in host["gpus"]) for host in json.loads(done.stdout)}


def end(lab: Lab, *runs: str) -> None:
    for box in lab.boxes:
        for run in runs:
            (box.home / "end" / run).touch()


def seen(lab: Lab, run: str, box: int, node: int = 0) -> str:
    """What a run's first rank there sees."""
    path = lab.boxes[box].home / f".ddpctl/runs/{run}/node-{node}/rank-{node * 2}.log"
    return path.read_text() if path.exists() else ""


def test_run_of_four_boxes_goes_on_with_three_and_is_removed(
    lab: Lab, record_property: Callable[[str, object], None]
) -> None:
    """Launch, look, lose a box, go on with three, pull, stop; the box comes back, and nothing is left anywhere."""

    def ddpctl(*args: str, code: int = 0) -> str:
        done = lab.ddpctl(*args)
        assert done.returncode == code, (args, done.stderr)
        return done.stdout + done.stderr

    def status() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(lab.ddpctl("status", "day", "--json").stdout)
        return document

    def first_node() -> NodeState:
        return read_node((lab.boxes[0].home / ".ddpctl/runs/day/node-0/node.json").read_text())

    write(lab, 0, 1, 2, 3, job="name: digits, nodes: '3:4', gpus: 1, device: cpu")
    last = lab.boxes[3].address

    launched = lab.start("launch", "--name", "day", "--", str(PACED), "--epochs", "5000")
    wait_until(lambda: re.search(r"epoch +2/", lab.log("day")), "the second epoch", timeout_s=300)

    (row,) = json.loads(ddpctl("ps", "--json"))
    assert (row["run"], row["state"], row["nodes"], row["target"]) == ("day", "training", "3:4", "boxes")
    assert [node["alive"] for node in status()["node_reports"]] == [True] * 4
    hosts = json.loads(ddpctl("hosts", "--json"))
    assert [(host["host"], [run["run"] for run in host["cpu_runs"]]) for host in hosts] == [
        (box.address, ["day"]) for box in lab.boxes
    ]
    lines = ddpctl("logs", "day", "--tail", "2").splitlines()
    assert sorted(lines, key=lambda line: line[:6]) == lines
    assert {line[:6] for line in lines} == {f"[node{node}" for node in range(4)}

    named = lab.output().count(last)
    lab.machines[3].cut()
    lab.machines[3].kill()
    try:
        cut = time.monotonic()
        wait_until(lambda: lab.output().count(last) > named, "the follower to name the host", timeout_s=300)
        wait_until(lambda: first_node().attempt == 2, "the second attempt", timeout_s=300)
        record_property("took", f"{time.monotonic() - cut:.1f} s")
        assert "node 3" in first_node().last_failure
        wait_until(lambda: status()["state"] == "training", "a step of three nodes", timeout_s=300)
        assert [node["alive"] for node in status()["node_reports"]] == [True] * 3 + [False]
        assert last in ddpctl("status", "day")

        pulled = ddpctl("pull", "day", "--into", str(lab.folder / "results"), code=69)
        assert f"\n{last}: " in pulled
        assert {path.name for path in (lab.folder / "results").glob("node-*")} == {"node-0", "node-1", "node-2"}
        assert list((lab.folder / "results/checkpoints").glob("step-*.pt"))

        assert f"{last} (node 3): " in ddpctl("stop", "day", code=69)
        assert launched.wait(90) == 143, lab.output()
        assert (status()["state"], status()["code"]) == ("stopped", 143)
    finally:
        lab.machines[3].plug_in()
        lab.boxes[3].start()
    ddpctl("rm", "day")
    assert lab.alive("day") == {}
    assert not [path for box in lab.boxes for path in box.home.glob(".ddpctl/runs/*/*")]
    assert json.loads(ddpctl("ps", "--json")) == []


def test_next_run_in_the_queue_starts_by_itself_when_gpus_are_free(lab: Lab) -> None:
    """Two have two GPUs each; a third and a fourth wait; the third is killed, and the fourth starts by itself."""
    write(lab, 0, job="name: hold, gpus: 2")
    box = lab.boxes[0].address
    for run in ("one", "two"):
        done = lab.ddpctl("launch", "--detach", "--name", run, "--", "hold.py")
        assert done.returncode == 0, done.stderr
    assert holders(lab) == {box: ("one", "one", "two", "two")}
    for run, gpus in (("one", "GPU-node-1-0,GPU-node-1-1"), ("two", "GPU-node-1-2,GPU-node-1-3")):
        wait_until(
            lambda run=run, gpus=gpus: seen(lab, run, 0) == f"sees {gpus}\n", f"the GPUs of {run}", timeout_s=120
        )
    refused = lab.ddpctl("launch", "--name", "three", "--", "hold.py")
    assert refused.returncode == 69
    assert re.search(r"'one' .*2 GPUs .*'two' .*2 GPUs ", refused.stderr), refused.stderr
    on_cpus = lab.ddpctl("launch", "--detach", "--device", "cpu", "--name", "cpu", "--", "hold.py")
    assert on_cpus.returncode == 0, on_cpus.stderr

    third = lab.start("launch", "--wait", "10m", "--name", "three", "--", "hold.py")
    wait_until(lambda: re.search("1 of 1 in the queue; .* 0 of 4 free", lab.output()), "its place", timeout_s=120)
    fourth = lab.start("launch", "--wait", "10m", "--name", "four", "--", "hold.py")
    wait_until(lambda: "place 2 of 2 in the queue, after run 'three'" in lab.output(), "its place", timeout_s=120)
    assert json.loads(lab.ddpctl("hosts", "--json").stdout)[0]["waiting"] == ["three", "four"]
    overtaking = lab.ddpctl("launch", "--name", "five", "--gpus", "1", "--", "hold.py")
    assert overtaking.returncode == 69
    os.killpg(third.pid, signal.SIGKILL)
    third.wait(20)
    wait_until(lambda: "place 1 of 1 in the queue; " in lab.output(), "its new place", timeout_s=120)
    end(lab, "two", "four")
    assert fourth.wait(180) == 0, lab.output()
    assert "sees GPU-node-1-2,GPU-node-1-3" in lab.output()
    assert holders(lab) == {box: ("one", "one", None, None)}


def test_launches_that_want_the_same_hosts_in_opposite_order_do_not_deadlock(lab: Lab) -> None:
    write(lab, 0, 1, job="name: hold, nodes: 2, gpus: 4")
    end(lab, "there", "back")
    assert lab.ddpctl("launch", "--detach", "--name", "now", "--", "hold.py").returncode == 0
    forth = lab.start("launch", "--wait", "10m", "--name", "there", "--", "hold.py")
    output_there = lab.folder / "there.txt"
    (lab.folder / "output.txt").rename(output_there)
    write(lab, 1, 0, job="name: hold, nodes: 2, gpus: 4")
    back = lab.start("launch", "--wait", "10m", "--name", "back", "--", "hold.py")
    first = f"waiting for {lab.boxes[0].address}: "
    wait_until(lambda: first in output_there.read_text() and first in lab.output(), "both wait", timeout_s=120)
    end(lab, "now")
    assert forth.wait(300) == 0, output_there.read_text()
    assert back.wait(300) == 0, lab.output()
    assert [text.count("GPU-node-1-0") for text in (output_there.read_text(), lab.output())] == [4, 4]
