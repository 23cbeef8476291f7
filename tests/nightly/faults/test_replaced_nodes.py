"""A controller replaces each node of a run several times, and a node 0 that was cut off comes back.

DDPCTL_TEST_REPLACEMENTS is how often each node is replaced.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_injection import job as fault_job
from fault_injection.job import NODES, WORLD
from tests.cluster.replaced_nodes import (
    LIMIT_S,
    MISSING,
    NAME,
    REPLACED,
    name_server,
    replace_nodes,
    script_args,
    undisturbed,
)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
TIMES = int(os.environ.get("DDPCTL_TEST_REPLACEMENTS", "2"))
STEPS = 40 + 40 * TIMES


@pytest.fixture
def weights(once: Callable[[str, Callable[[], str]], str], tmp_path: Path) -> str:
    """The weights of an undisturbed run."""
    return once(f"replaced-{STEPS}", lambda: undisturbed(tmp_path / "calm", STEPS))


@pytest.mark.timeout(120 + 200 * TIMES)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_survivors_stay_and_go_on_with_the_successor(how: signal.Signals, tmp_path: Path, weights: str) -> None:
    replace_nodes(how, [1, 0] * TIMES, STEPS, tmp_path, weights)


def test_of_two_node_0s_the_one_that_has_the_name_goes_on(tmp_path: Path, weights: str) -> None:
    """Node 0 is cut off, and replaced; then it is back."""
    names = tmp_path / "names"
    names.write_text(f"{NAME} 10.77.0.10 0\n")
    options = {
        "prefix": "reptwo",
        "script_args": script_args(STEPS),
        "master": NAME,
    }
    environ = dict.fromkeys(range(NODES), REPLACED)
    with fault_job.start_job(tmp_path / "run", spares=1, environ=environ, **options) as job, name_server(job, names):
        job.start()
        job.until(lambda: job.reached(1), "the first step", LIMIT_S)
        first, survivor, machines = job.processes.pop(0), job.processes[1], job.machines
        pids = {rank: job.pids(rank) for rank in WORLD}
        machines[0].cut()
        names.write_text(f"{NAME} {machines[2].address} 0\n")
        folders = {"DDP_RUN_DIR": str(tmp_path / "second"), "DDP_CHECKPOINT_DIR": str(job.folder / "checkpoints")}
        job.environ[0] = REPLACED | folders
        job.machines = (machines[2], machines[1])
        job.start(0)
        job.until(lambda: job.first_steps_of_new(pids), "the first step with the second node 0", LIMIT_S)
        assert first.poll() is None
        machines[0].plug_in()
        job.until(lambda: first.poll() is not None, "the end of the first node 0", LIMIT_S)
        outcome = job.outcome(0)
        assert outcome is not None
        assert (first.returncode, outcome.code, outcome.cause, outcome.node) == (137, 137, "node_lost", 0)
        assert job.processes[1] is survivor
        job.until(job.has_ended, "the end of the run", LIMIT_S)
        assert job.codes == {0: [0], 1: [0]}
        assert job.weights() == {str(rank): weights for rank in WORLD}
