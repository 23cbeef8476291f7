"""A recording of a rank for ddpctl profile, where the script records or forks itself, or exits."""

import json
import subprocess
import sys
from pathlib import Path

from bench.measuring import runtime_files
from tests.e2e.driver import ROOT, ddpctl, wait_until

PROFILED = ROOT / "tests/nightly/e2e/scripts/profiled.py"
EXPECTED = {  # what the script does → why ddpctl gets no profile, and whether the recording has the script's operators
    "own_first": ["not recorded, because the script runs its own profiler", False],
    "own_second": ["", True],
    "fork": ["", True],
}


def test_a_profiler_of_the_script_a_fork_and_an_exit_end_a_recording(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROFILED)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == EXPECTED


def test_the_only_rank_of_a_run_is_recorded_without_a_process_group(tmp_path: Path) -> None:
    argv = ("--device", "cpu", "--name", "single", "--", "--data", "digits", "--epochs", "100000")
    assert ddpctl("launch", "--detach", *argv).returncode == 0
    try:
        wait_until(lambda: runtime_files(tmp_path / "runs/single", "heartbeat/rank-0.sock"), "a step", timeout_s=200)
        assert runtime_files(tmp_path / "runs/single", "heartbeat/rank-0.group") == []
        done = ddpctl("profile", "single", "--seconds", "1", "-o", str(tmp_path / "trace.json.gz"), "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["unknown"], list(result["shares"]), result["slowest"]) == ([], ["0"], None)
        assert result["shares"]["0"]["compute"] > 0
    finally:
        ddpctl("stop", "--kill", "single")
