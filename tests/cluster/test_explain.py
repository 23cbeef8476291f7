"""Ranks on two machines whose packets do not arrive: the link is named, and no rank. Ranks of one machine: e2e."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from bench.measuring import runtime_files
from explain_cases import nodes
from tests.e2e.driver import ddpctl, wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: machines are network namespaces"),
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("iptables") and Path("/proc/self/ns/net").exists()),
        reason="needs Linux, ip and iptables (apt install iproute2 iptables): machines are network namespaces",
    ),
]


def explained(run: Path) -> dict[str, object]:
    done = ddpctl("explain", "--json", str(run))
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"cause": "", "unknown": [done.stderr]}


def test_explain_names_the_link_between_two_nodes(tmp_path: Path) -> None:
    run = tmp_path / "site" / "run"
    with nodes.launched("link_of_ranks_is_down", tmp_path / "site") as cut:
        wait_until(lambda: len(runtime_files(run, "heartbeat/*.group")) == 4, "four ranks", timeout_s=200)
        # Before their first collective, the ranks may still connect to each other, and send nothing that is lost.
        wait_until(
            lambda: re.search(r"\b[1-9]\d*\)?( are)? recorded", str(explained(run).get("sentence"))),
            "the first collectives",
            timeout_s=200,
        )
        cut()
        wait_until(lambda: explained(run)["cause"] == "network", "packets that are sent again", timeout_s=200)
        result = explained(run)
    assert (result["cause"], result["rank"], result["node"], result["unknown"]) == ("network", None, None, [])
