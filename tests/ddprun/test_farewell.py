"""The sentence at the end of a run that failed: told once, by the node that it is about, with the right log."""

from pathlib import Path

import pytest

from ddprun.farewell import farewell
from ddpwire.outcome import Outcome

RAISED = Outcome(code=1, cause="error", message="rank 3 on node 1 exited with 1: ValueError: bad", node=1, rank=3)
STOPPED = Outcome(code=143, cause="stopped", message="rank 3 was told to stop by SIGTERM, and all did", rank=3)
LOST = Outcome(code=137, cause="node_lost", message="node 1 was lost: its ddprun fell silent", node=1)
HEAD_LOST = Outcome(code=137, cause="node_lost", message="node 0 was lost: its store is gone", node=0)
ABSENT = Outcome(code=142, cause="absent", message="node 2 of 3 did not come within 1 s")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            RAISED,
            (
                "ends with rank 3 on node 1 (exit code 1; logs of this node in RUN/node-0)",
                "rank 3 on node 1 exited with 1: ValueError: bad (exit code 1; the log of rank 3 is "
                "RUN/node-1/rank-3.log)",
                "ends with rank 3 on node 1 (exit code 1; logs of this node in RUN/node-2)",
            ),
        ),
        (
            STOPPED,
            (
                "rank 3 was told to stop by SIGTERM, and all did (exit code 143; logs in RUN/node-0)",
                "ends with node 0, which says why (exit code 143; logs of this node in RUN/node-1)",
                "ends with node 0, which says why (exit code 143; logs of this node in RUN/node-2)",
            ),
        ),
        (
            LOST,
            (
                "node 1 was lost: its ddprun fell silent (exit code 137; logs in RUN/node-0)",
                "node 1 was lost: its ddprun fell silent (exit code 137; logs in RUN/node-1)",
                "ends with node 1 (exit code 137; logs of this node in RUN/node-2)",
            ),
        ),
        (HEAD_LOST, tuple(f"{HEAD_LOST.message} (exit code 137; logs in RUN/node-{node})" for node in range(3))),
        (ABSENT, tuple(f"{ABSENT.message} (exit code 142; logs in RUN/node-{node})" for node in range(3))),
    ],
)
def test_each_nodes_last_line(outcome: Outcome, said: tuple[str, ...]) -> None:
    for node, line in enumerate(said):
        folder = Path("RUN") / f"node-{node}"
        assert farewell(outcome, node=node, folder=folder, on_one_machine=False) == line
        alone = "" if line.startswith("ends with ") else line
        assert farewell(outcome, node=node, folder=folder, on_one_machine=True) == alone


def test_two_nodes_tell_the_failure_once_and_without_torchs_own_prefix(runs) -> None:
    first, second = runs.pair("torn.py", options=("--max-restarts", "0"))
    assert (first.end(timeout_s=300), second.end()) == (1, 1)
    assert first.stdout.read_text() == ""
    assert first.said()[:1] == ["[node0] rank 0 of 2 started (attempt 1)"]
    said = [*first.said()[1:], *second.said()]
    assert [line for line in said if "what other ranks said" not in line] == [
        "[node1] rank 1 of 2 started (attempt 1)",
        "[node1] rank 1 on node 1 exited with 1: ValueError: bad label 17 "
        "(exit code 1; the log of rank 1 is RUN/node-1/rank-1.log)",
    ]
    shown = [line for line in second.stdout.read_text().splitlines() if "^^^" not in line]
    script = Path(__file__).parent / "scripts/torn.py"
    assert shown == [
        "[node1 rank1] Traceback (most recent call last):",
        f'[node1 rank1]   File "{script}", line 8, in <module>',
        '[node1 rank1]     raise ValueError("bad label 17")',
        "[node1 rank1] ValueError: bad label 17",
    ]
    assert "[rank1]: ValueError: bad label 17\n" in second.log(1), "its file is as it wrote it"
