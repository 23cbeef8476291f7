"""ddpctl profile: all ranks of a run at the same time, while it runs."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.driver import ROOT, SCRIPTS, ddpctl, wait_until
from tests.unit.ddpctl.test_profile import check_chrome_trace

from ddpwire.run_files import runtime_files

PROFILED = ROOT / "tests/unit/ddprun/scripts/profiled.py"
EXPECTED = {  # what the script does → why ddpctl gets no profile, and whether the recording has the script's operators
    "own_first": ["not recorded, because the script runs its own profiler", False],
    "own_second": ["", True],
    "fork": ["", True],
}


def test_the_slow_rank_of_two_nodes_is_named(tmp_path: Path) -> None:
    slow = str(SCRIPTS / "uneven.py")
    assert ddpctl("launch", "--detach", "--nodes", "2", "--ranks", "2", "--gpus", "2", "--device", "cpu",
                  "--name", "uneven", "--", slow).returncode == 0  # fmt: skip
    try:
        group = "heartbeat/rank-3.group"
        wait_until(lambda: runtime_files(tmp_path / "runs/uneven", group) != [], "a group", timeout_s=200)
        found: dict = {}

        def is_named() -> bool:
            argv = ("--seconds", "1.5", "-o", str(tmp_path / "trace.json.gz"), "--json")
            done = ddpctl("profile", "uneven", *argv, timeout=200)
            assert done.returncode in (0, 69), done.stderr  # 69: its nodes have not said yet that their ranks run
            found.update(json.loads(done.stdout or "{}"))
            return found.get("slowest") == 3

        wait_until(is_named, "rank 3 to be named", timeout_s=200)
        assert (found["slowest"], found["unknown"], sorted(found["shares"])) == (3, [], ["0", "1", "2", "3"])
        assert "uneven.py:14 (dawdle)" in found["sentence"]
        assert found["shares"]["3"]["idle"] > 0.5 > found["shares"]["3"]["exposed"]
        events = check_chrome_trace(Path(found["trace"]).read_bytes())
        names = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
        assert {(rank, name) for rank in range(4) for name in ("aten::linear", "gloo:all_reduce")} <= names
        flows = {event["name"].partition(" ")[0]: event["pid"] for event in events if event["ph"] == "f"}
        assert {"fwdbwd", "all_reduce"} <= flows.keys()
        assert json.loads(ddpctl("status", "--json", "uneven").stdout)["state"] == "running"
    finally:
        ddpctl("stop", "--kill", "uneven")
    done = ddpctl("profile", "uneven")
    assert (done.returncode, "no rank runs" in done.stderr) == (69, True)


def test_the_scripts_own_profiler_a_fork_and_an_exit_end_a_recording(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROFILED)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == EXPECTED
