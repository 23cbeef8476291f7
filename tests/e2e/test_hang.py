"""A run that hangs is explained while it hangs, and after it was killed for it."""

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

from bench.measuring import runtime_files
from tests.e2e.driver import ROOT, SCRIPTS, ddpctl, wait_until
from tests.in_process import ddpctl as in_process

from ddpwire.run_files import read_node

CASES = ROOT / "bench/explain_cases/cases.py"
NODES = ("--nodes", "2", "--ranks", "2", "--gpus", "2", "--device", "cpu")


def explain(run: str) -> dict[str, Any]:
    done = in_process("explain", "--json", run)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_explain_names_the_rank_its_node_and_its_line_of_a_run_that_hangs(tmp_path: Path) -> None:
    launched = ddpctl("launch", "--detach", *NODES, "--name", "hangs", "--", str(CASES), "worker_stalls")
    assert launched.returncode == 0, launched.stderr
    try:
        answer: dict[str, Any] = {}

        def is_explained() -> bool:
            """Return whether explain names the cause, and that the three other ranks wait: they come one by one."""
            answer.update(explain("hangs"))
            return answer["cause"] == "data_loader" and " 3 ranks " in answer["sentence"]

        wait_until(is_explained, "the hang", timeout_s=200)
        assert (answer["run"], answer["state"], answer["rank"], answer["node"]) == ("hangs", "running", 1, 0)
        assert (len(answer["evidence"]), answer["unknown"]) == (4, [])
        named = ("rank 1", "node 0", "all_reduce #26", "cases.py:", "(train)", "(stall)")
        assert [fact for fact in named if fact not in answer["sentence"]] == []
        rank = read_node((tmp_path / "runs/hangs/node-1/node.json").read_text()).ranks[0]
        os.kill(rank.pid, signal.SIGSTOP)
        answer = explain("hangs")
        assert (answer["cause"], answer["rank"], answer["node"], answer["fault"]) == ("stopped_process", 2, 1, True)
        assert answer["sentence"] in in_process("timeline", "hangs").stdout
    finally:
        ddpctl("stop", "--kill", "hangs")
    answer = explain("hangs")
    assert (answer["state"], answer["cause"], answer["rank"], answer["fault"]) == ("stopped", "none", None, False)


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
