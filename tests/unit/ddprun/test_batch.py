"""The batch step of a Slurm job: how many signals the ranks should get, and what a node lacks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddprun import batch

USR1, USR2, INT = signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[batch.BatchStep]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    yield batch.BatchStep(["srun", "--nodes=2", "python"], tmp_path, max_requeues=1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "wanted"),
    [
        ([USR1], 1),
        ([USR1, USR1], 1),
        ([USR2], 1),
        ([USR2, USR2], 2),  # the second one kills the ranks
        ([INT, INT], 2),
        ([USR1, USR2], 1),  # the ranks are saving already
        ([USR1, INT, INT], 2),
    ],
)
def test_only_a_second_request_to_stop_is_a_second_signal(
    step: batch.BatchStep, signals: list[int], wanted: int
) -> None:
    for number in signals:
        step._receive(number)
    assert step._wanted == wanted


def test_node_that_does_not_see_the_file_of_node_0_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node-1")
    monkeypatch.setattr(batch, "SHARED_S", 0.0)
    assert batch.check_node(tmp_path / "token") == 66
    message = capsys.readouterr().err
    assert ("node-1" in message, str(tmp_path) in message, "RUN_DIR" in message) == (True, True, True)
    (tmp_path / "token").touch()
    assert batch.check_node(tmp_path / "token") == 0
