"""A run that hangs is explained while it hangs, and after it was killed for it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e.driver import ROOT, ddpctl, wait_until
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
