"""The sentence at the end of a run that failed: told once, by the node that it is about, with the right log."""

from pathlib import Path

import pytest

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
def test_each_nodes_last_line(outcome: Outcome, silent: tuple[int, ...]) -> None:
    """``silent``: the nodes that name another one, and log nothing where all nodes are on one machine."""
    for node in range(3):
        folder = Path("RUN") / f"node-{node}"
        line = exit_message(outcome, node=node, folder=folder, on_one_machine=False)
        assert (outcome.message in line) == (node not in silent or outcome.cause == "stopped")
        log = folder / "rank-3.log" if (outcome.node, outcome.rank) == (node, 3) else folder
        assert line.endswith(f"{log})")
        assert str(outcome.code) in line
        assert outcome.node is None or f"node {outcome.node}" in line
        alone = "" if node in silent else line
        assert exit_message(outcome, node=node, folder=folder, on_one_machine=True) == alone
        for here in (True, False):
            assert outcome.message in exit_message(outcome, node=node, folder=folder, on_one_machine=here, by_hand=True)
