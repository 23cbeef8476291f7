"""ddpctl doctor on four SSH machines out of namespaces: sound ones, then each with faults planted. Needs root."""

import json
from pathlib import Path

import pytest
from bench.doctor import (
    ONE_PORT_OPEN,
    SEE_GROUPS,
    SMALL_SHM,
    bad_places,
    examine,
    full,
    lab,
    loopback_name,
    quota,
    small_mtu,
    stale_library,
    write,
    wrong_clock,
)
from tests.cluster.ssh_lab import ROOT_MISSING

pytestmark = pytest.mark.skipif(ROOT_MISSING is not None, reason=str(ROOT_MISSING))
TIMEOUT_S = 300


def test_each_fault_is_named_with_its_node_and_nothing_sound_is_accused(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    before = (
        ONE_PORT_OPEN,
        f"ulimit -n 256\n{SEE_GROUPS}",
        "",
        f"{stale_library(tmp_path)}{SMALL_SHM}{full(checkpoints)}",
    )
    environ = ({}, {}, wrong_clock(tmp_path), {})
    with lab(tmp_path, before, environ) as cluster, quota(cluster.boxes[1].process.pid, 0.2):
        small_mtu(cluster, 2)
        loopback_name(cluster, 2)
        write(cluster, options=f"    checkpoint_dir: {checkpoints}\n")
        result = examine(cluster)
        cluster.boxes[1].kill()
        without = examine(cluster)
    found = {(one["node"], one["check"]): one for one in result["results"]}
    bad = bad_places(result)
    print(json.dumps([one for one in result["results"] if one["status"] in ("bad", "warning")], indent=1))
    assert result["code"] == 69
    planted = {
        (0, "ports"),
        (1, "open files"),
        (2, "path MTU"),
        (2, "names"),
        (2, "clock"),
        (3, "/dev/shm"),
        (3, "libraries"),
        (3, "disk"),
    }
    assert bad - {(1, "CPU")} == planted
    loaded = all(found[node, "CPU"]["status"] == "warning" for node in range(4))  # then the quota may not be reached
    assert found[1, "CPU"]["status"] == "bad" or loaded
    assert "cannot connect" in found[0, "ports"]["value"]
    assert "1400" in found[2, "path MTU"]["value"]
    assert len(result["findings"]) == len(bad)
    assert {one["node"] for one in result["nodes"]} == {0, 1, 2, 3}
    assert bad_places(without) == planted - {(1, "open files")} | {(1, "SSH")}
    assert {one["node"] for one in without["nodes"]} == {0, 1, 2, 3}
    assert not list((tmp_path / "runs").glob("doctor-*"))


def test_a_launch_leaves_a_bad_machine_out_and_goes_on_with_sound_ones(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('trained by', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    with lab(tmp_path, ("", SMALL_SHM, "")) as cluster:
        write(cluster, nodes=2)
        done = cluster.ddpctl("launch", "--doctor", "--", str(script), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert f"{cluster.boxes[1].address} left out; the doctor checks the other machines" in done.stderr
    assert "trained by 1 of 2" in done.stdout
    assert done.stderr.count("path MTU") == 2  # two tables; the second has nothing bad
    assert done.stderr.rindex("BAD") < done.stderr.index("left out")
