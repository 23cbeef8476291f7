"""``ddpctl bench`` on this machine (tests/cluster has slow links): its figures, a wrong result, Ctrl-C."""

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.e2e.driver import DDPCTL, ddpctl, processes_of, start

from ddpwire.log_record import unpack_result


def test_a_second_bench_of_two_ranks_compares_with_the_first(tmp_path: Path) -> None:
    first = ddpctl("bench", "--gpus", "2", "--sizes", "1M,1001", "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert "last" not in result
    again = ddpctl("bench", "--gpus", "2", "--sizes", "1M")
    assert again.returncode == 0, again.stderr
    lines = again.stdout.splitlines()
    assert sum(line.startswith(("all_reduce ", "send_recv ")) for line in lines) == 2
    assert any(line.startswith("busbw: ") for line in lines)
    assert max(map(len, lines)) <= 80
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []


def test_a_wrong_sum_is_named_with_its_rank() -> None:
    done = ddpctl("launch", "--gpus", "2", "--", str(Path(__file__).parent / "scripts/wrong_sum.py"))
    assert done.returncode == 0, done.stdout
    result = unpack_result(done.stdout)
    assert result is not None
    assert [(row["collective"], row["wrong"]) for row in result["collectives"] if row["wrong"]] == [
        ("all_reduce", {"1": 3})
    ]
    (finding,) = result["findings"]
    assert [fact for fact in ("all_reduce", "4 KiB", "3 elements", "rank 1") if fact not in finding] == []
    assert result["code"] == 69


def test_ctrl_c_of_a_bench_leaves_nothing(tmp_path: Path) -> None:
    attached = start("bench", "--gpus", "2", "--sizes", "64M")
    assert attached.stdout is not None
    while not (line := attached.stdout.readline()).startswith("all_reduce "):
        assert line
    (run,) = (path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith("bench-"))
    os.killpg(attached.pid, signal.SIGINT)
    output, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, output
    assert processes_of(run) == {}
    assert not (tmp_path / "runs" / run).exists()


def test_bench_into_a_closed_pipe_ends_quietly_and_has_its_result(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*DDPCTL, "bench", "--nodes", "2", "--sizes", "64K"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=240)
    os.close(writing)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []
    assert (tmp_path / "runs/.checks/bench-local.json").is_file()
