"""ddpctl profile: all ranks of a run at the same time, while it runs."""

import gzip
import json
from pathlib import Path
from typing import Any

from bench.measuring import runtime_files
from tests.e2e.driver import SCRIPTS, ddpctl, wait_until
from tests.in_process import ddpctl as in_process


def test_profile_names_the_slow_rank_of_two_nodes_and_its_line(tmp_path: Path) -> None:
    slow = str(SCRIPTS / "uneven.py")
    assert ddpctl("launch", "--detach", "--nodes", "2", "--ranks", "2", "--gpus", "2", "--device", "cpu",
                  "--name", "uneven", "--", slow).returncode == 0  # fmt: skip
    try:
        wait_until(lambda: runtime_files(tmp_path / "runs/uneven", "heartbeat/rank-3.group"), "a group", timeout_s=200)
        result: dict[str, Any] = {}

        def is_named() -> bool:
            argv = ("--seconds", "1.5", "-o", str(tmp_path / "trace.json.gz"), "--json")
            done = ddpctl("profile", "uneven", *argv, timeout=200)
            assert done.returncode in (0, 69), done.stderr  # 69: its nodes have not yet reported ranks
            result.update(json.loads(done.stdout or "{}"))
            return result.get("slowest") == 3

        wait_until(is_named, "rank 3 to be named", timeout_s=200)
        assert (result["slowest"], result["unknown"], sorted(result["shares"])) == (3, [], ["0", "1", "2", "3"])
        assert "uneven.py:14 (dawdle)" in result["sentence"]
        assert result["shares"]["3"]["idle"] > 0.5 > result["shares"]["3"]["exposed"]
        events = json.loads(gzip.decompress(Path(result["trace"]).read_bytes()))["traceEvents"]
        names = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
        assert {(rank, name) for rank in range(4) for name in ("aten::linear", "gloo:all_reduce")} <= names
        flows = {event["name"].partition(" ")[0]: event["pid"] for event in events if event["ph"] == "f"}
        assert {"fwdbwd", "all_reduce"} <= flows.keys()
        assert json.loads(ddpctl("status", "--json", "uneven").stdout)["state"] == "running"
    finally:
        ddpctl("stop", "--kill", "uneven")
    assert in_process("profile", "uneven").returncode == 69  # no rank runs
