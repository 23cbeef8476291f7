"""Faults of a training on two machines of two ranks each (docs/results/faults.md).

The faults are those of the benchmark (bench/fault_injection/rows.py), which injects them more often. Each test also
compares the weights with those of an undisturbed run, looks for processes that are left, and checks the outcome, the
exit code and the counters of each node. The benchmark also judges the seconds. A test does not, because they depend on
what else runs on the machine.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
from bench.measuring import runtime_files
from explain_cases import nodes
from fault_injection import job as fault_job
from fault_injection.experiment import undisturbed
from fault_injection.result import violations
from fault_injection.rows import ROWS, Row, try_fault
from lab import GROUPS
from tests.cluster import replaced_nodes
from tests.cluster.test_faults import TITLES as DAILY
from tests.e2e.driver import ddpctl, wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: machines are network namespaces"),
    pytest.mark.skipif(
        shutil.which("ip") is None or not Path("/proc/self/ns/net").exists(),
        reason="needs Linux and ip (apt install iproute2): machines are network namespaces",
    ),
]


@pytest.fixture
def weights(once: Callable[[str, Callable[[], str]], str], tmp_path: Path) -> str:
    """What an undisturbed run ends with."""
    return once("faults", lambda: undisturbed(tmp_path / "calm"))


# One rank that fails by itself is enough here: the codes of others are tested in tests/contract/ddprun.
LEFT_OUT = ("a rank segfaults", "a rank exits with 78", *DAILY)
TRIED = [row for row in ROWS if row.title not in LEFT_OUT]


@pytest.mark.parametrize("row", TRIED, ids=[f"{row.number}-{row.title}" for row in TRIED])
def test_a_fault(row: Row, tmp_path: Path, weights: str) -> None:
    if row.number == 27 and not (GROUPS / "memory").is_dir():
        pytest.skip(f"needs memory cgroups (v1) in {GROUPS / 'memory'}")
    result = try_fault(row, tmp_path / "run", weights, seed=0)
    assert violations(result, row.bars, timed=False) == ()


def test_the_benchmark_prints_and_records_a_row_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    monkeypatch.setattr(faults, "undisturbed", lambda _: weights)
    results = tmp_path / "faults.json"
    monkeypatch.setattr(sys, "argv", ["faults.py", "--rows", "14", "--json", str(results)])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    (tried,) = json.loads(results.read_text())
    ended_s = tried["result"]["ended_s"]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| # | what happens | noticed, s | trains again, s | ended, s | steps lost | left | as expected |",
        "|---|---|---|---|---|---|---|---|",
        f"| 14 | the port is taken | - | - | {ended_s:.2f} | - | 0 | {int(not tried['wrong'])} of 1 |",
        "",
    ]
    assert ended.value.code == len(tried["wrong"])


def test_two_nodes_meet_while_their_name_server_is_late(tmp_path: Path) -> None:
    """torch asks for the name of each address that connects to a store, while nobody else is served."""
    (tmp_path / "names").touch()  # each answer is that there is no such name, a second late
    options = {"prefix": "late", "master": "10.77.0.10", "script_args": replaced_nodes.script_args(20)}
    with fault_job.start_job(tmp_path / "run", **options) as job, replaced_nodes.name_server(job, tmp_path / "names"):
        job.start()
        job.until(job.has_ended, "the end of the run", replaced_nodes.LIMIT_S)
        assert job.codes == {0: [0], 1: [0]}


@pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables (apt install iptables)")
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


def explained(run: Path) -> dict[str, object]:
    done = ddpctl("explain", "--json", str(run))
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"cause": "", "unknown": [done.stderr]}
