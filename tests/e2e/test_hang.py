"""A run that hangs is explained while it hangs, and after it was killed for it."""

import json
import os
import re
import signal
from pathlib import Path

from tests.e2e.driver import ROOT, ddpctl, wait_until
from tests.wording import Wording

from ddpwire.run_files import read_node

CASES = ROOT / "bench/explain_cases/cases.py"
NODES = ("--nodes", "2", "--ranks", "2", "--gpus", "2", "--device", "cpu")


def explained(run: str) -> dict[str, object]:
    done = ddpctl("explain", "--json", run)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_run_that_hangs_is_explained_and_goes_on(tmp_path: Path, wording: Wording) -> None:
    launched = ddpctl("launch", "--detach", *NODES, "--name", "hangs", "--", str(CASES), "worker_stalls")
    assert launched.returncode == 0, launched.stderr
    try:
        found: dict[str, object] = {}

        def is_explained() -> bool:
            """Return whether explain has found the cause, and that the three other ranks wait: they come one by one."""
            found.update(explained("hangs"))
            return found["cause"] == "data_loader" and " 3 ranks have been waiting " in str(found["sentence"])

        wait_until(is_explained, "the hang", timeout_s=200)
        assert (found["run"], found["state"], found["rank"], found["node"]) == ("hangs", "running", 1, 0)
        assert (len(found["evidence"]), found["unknown"]) == (4, [])
        sentence = str(found["sentence"]).partition(". A wait of less than ")[0]
        wording(re.sub(r"(?<=waiting in it for )[\d.]+ s\b", "N s", sentence))
        rank = read_node((tmp_path / "runs/hangs/node-1/node.json").read_text()).ranks[0]
        os.kill(rank.pid, signal.SIGSTOP)
        found = explained("hangs")
        assert (found["cause"], found["rank"], found["node"], found["fault"]) == ("stopped_process", 2, 1, True)
        assert f"why: {found['sentence']}" in ddpctl("timeline", "hangs").stdout
    finally:
        ddpctl("stop", "--kill", "hangs")
    found = explained("hangs")
    assert found["sentence"] == "stopped by you (ddpctl stop)"
    assert (found["state"], found["cause"], found["rank"], found["fault"]) == ("stopped", "none", None, False)
