"""The sentence at the end of a run that failed: told once, by the node that it is about, with the right log."""

from pathlib import Path

import pytest
from tests.wording import Wording

from ddprun.main import exit_message
from ddpwire.run_files import Outcome

RAISED = Outcome(code=1, cause="error", message="rank 3 on node 1 exited with 1: ValueError: bad", node=1, rank=3)
STOPPED = Outcome(code=143, cause="stopped", message="rank 3 received SIGTERM, and all ranks stopped", rank=3)
LOST = Outcome(code=137, cause="node_lost", message="node 1 was lost: its ddprun stopped responding", node=1)
HEAD_LOST = Outcome(code=137, cause="node_lost", message="node 0 was lost: its store no longer answers", node=0)
ABSENT = Outcome(code=142, cause="absent", message="node 2 of 3 did not join within 1 s")


@pytest.mark.parametrize(
    ("outcome", "silent"),
    [
        pytest.param(RAISED, (0, 2), id="raised"),
        pytest.param(STOPPED, (1, 2), id="stopped"),
        pytest.param(LOST, (2,), id="node-1-lost"),
        pytest.param(HEAD_LOST, (), id="node-0-lost"),
        pytest.param(ABSENT, (), id="absent"),
    ],
)
def test_each_nodes_last_line(wording: Wording, outcome: Outcome, silent: tuple[int, ...]) -> None:
    """``silent``: the nodes that name another one, and log nothing where all nodes are on one machine."""
    for node in range(3):
        folder = Path("RUN") / f"node-{node}"
        line = exit_message(outcome, node=node, folder=folder, on_one_machine=False)
        assert (outcome.message in line) == (node not in silent or outcome.cause == "stopped")
        wording(line)
        alone = "" if node in silent else line
        assert exit_message(outcome, node=node, folder=folder, on_one_machine=True) == alone
        for here in (True, False):
            assert outcome.message in exit_message(outcome, node=node, folder=folder, on_one_machine=here, by_hand=True)


def test_two_nodes_report_the_failure_once_and_without_torchs_own_prefix(
    runs, wording: Wording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_LAUNCHER", "local")  # which shows the lines of both
    first, second = runs.pair("torn.py", options=("--max-restarts", "0"))
    assert (first.end(timeout_s=300), second.end()) == (1, 1)
    assert first.stdout.read_text() == ""
    said = [*first.said(), *second.said()]
    wording("\n".join(line for line in said if "rank-0.log" not in line))  # rank 0 may have failed after it
    shown = [line for line in second.shown() if "^^^" not in line]
    script = Path(__file__).parent / "scripts/torn.py"
    assert shown == [
        "[node1 rank1] Traceback (most recent call last):",
        f'[node1 rank1]   File "{script}", line 8, in <module>',
        '[node1 rank1]     raise ValueError("bad label 17")',
        "[node1 rank1] ValueError: bad label 17",
    ]
    assert "[rank1]: ValueError: bad label 17\n" in second.log(1), "its file is as it wrote it"
