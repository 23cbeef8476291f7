"""``ddpctl bench`` on this machine (tests/cluster has slow links): its figures, a wrong result, Ctrl-C."""

import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.driver import SCRIPTS, ddpctl, processes_of, start

from ddpwire.log_record import unpack_result


def test_two_ranks_are_measured_and_compared_with_the_last_time(tmp_path: Path) -> None:
    first = ddpctl("bench", "--gpus", "2", "--sizes", "1M,1001", "--json")
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert (found["check"], found["ranks"], found["backend"], found["code"]) == ("bench", 2, "gloo", 0)
    rows = {(row["collective"], row["bytes"]): row for row in found["collectives"]}
    assert len(rows) == 18
    assert {size for _, size in rows} == {1000, 1 << 20}
    factors = {name: row["busbw"] / row["algbw"] for (name, _), row in rows.items()}
    half = dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), 0.5)
    assert factors == pytest.approx({**half, **dict.fromkeys(("all_reduce", "broadcast", "reduce", "send_recv"), 1.0)})
    for (_, size), row in rows.items():
        assert row["algbw"] == pytest.approx(size / row["seconds"] / 1e9)
        assert row["wrong"] == {}
    assert ([link[:2] for link in found["links"]], found["slow"], "last" in found) == ([[0, 1]], [], False)
    again = ddpctl("bench", "--gpus", "2", "--sizes", "1M")
    assert again.returncode == 0, again.stderr
    lines = again.stdout.splitlines()
    assert sum(line.startswith(("all_reduce ", "send_recv ")) for line in lines) == 2
    assert any(line.startswith("busbw: ") for line in lines)
    assert max(map(len, lines)) <= 80
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []


def test_a_wrong_result_is_named_with_its_rank() -> None:
    done = ddpctl("launch", "--gpus", "2", "--", str(SCRIPTS / "wrong_sum.py"))
    assert done.returncode == 0, done.stdout
    found = unpack_result(done.stdout)
    assert found is not None
    assert [(row["collective"], row["wrong"]) for row in found["collectives"] if row["wrong"]] == [
        ("all_reduce", {"1": 3})
    ]
    (finding,) = found["findings"]
    assert finding.startswith("all_reduce of 4 KiB: 3 elements are wrong on rank 1 ")
    assert found["code"] == 69


def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    attached = start("bench", "--gpus", "2", "--sizes", "64M")
    assert attached.stdout is not None
    while not (line := attached.stdout.readline()).startswith("all_reduce "):
        assert line
    (run,) = (path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith("bench-"))
    os.killpg(attached.pid, signal.SIGINT)
    said, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, said
    assert processes_of(run) == {}
    assert not (tmp_path / "runs" / run).exists()
