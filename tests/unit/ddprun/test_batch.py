"""The batch step of a Slurm job: how many signals the ranks should get, and what a node lacks."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddprun import batch
from ddpwire.run_files import OUTCOME, Outcome, read_outcome

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
        ([USR2, USR2], 2),  # the second one kills the ranks
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


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Programs of Slurm that write their arguments into a file, and then do as they are told."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def program(name: str, text: str) -> None:
        (path := tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/{name}.calls\n{text}\n')
        path.chmod(0o755)

    return program


TIMED_OUT = 'echo "Socket timed out on send/recv operation" >&2; exit 1'


@pytest.mark.parametrize(
    ("text", "restarts", "kept"),
    [
        ("exit 0", 0, True),
        ("echo denied >&2; exit 1", 0, False),
        ("echo denied >&2; exit 1", 1, True),  # Slurm itself has requeued the job
        (TIMED_OUT, 0, True),
    ],
)
def test_secrets_stay_for_a_job_that_may_be_requeued(step, slurm, tmp_path, monkeypatch, text, restarts, kept):
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    slurm("srun", "case $* in *--check*) exit 0 ;; esac; exit 137")
    slurm(
        "scontrol", f"case $* in *show*) echo 'JobId=7 JobName=x Restarts={restarts} BatchFlag=1'; exit ;; esac; {text}"
    )
    (tmp_path / "secrets").touch()
    assert step.run() == 137
    assert (tmp_path / "secrets").exists() == kept


def test_a_request_that_slurm_does_not_answer_is_not_sent_again(
    step: batch.BatchStep, slurm: Callable[[str, str], None], tmp_path: Path
) -> None:
    slurm("scancel", TIMED_OUT)
    step._receive(USR2)
    step._send("0")
    assert step._sent == step._wanted == 1
    slurm("scancel", "echo 'Invalid job id' >&2; exit 1")
    step._receive(USR2)
    step._send("0")
    assert (step._sent, step._wanted) == (1, 2)
    assert (tmp_path / "scancel.calls").read_text().count("--signal=TERM 7.0") == 2


@pytest.mark.parametrize(
    ("text", "sent"), [("echo COMPLETING", 1), ("echo RUNNING", 0), ("exit 1", 0), (TIMED_OUT, 0), ("exit 0", 1)]
)
def test_a_sigterm_is_passed_on_unless_slurm_says_that_the_job_ends(
    step: batch.BatchStep, slurm: Callable[[str, str], None], text: str, sent: int
) -> None:
    slurm("squeue", text)
    step._receive(signal.SIGTERM)
    assert (step._sent, step._wanted) == (sent, 1)


@pytest.mark.parametrize(
    ("end", "code", "outcomes", "signals", "requeued"),
    [
        pytest.param(137, 137, [(137, "killed", True)], [], True, id="killed"),
        pytest.param(137, 137, [(137, "setup", False)], [], False, id="node-setup-failed"),
        pytest.param(137, 0, [(0, "ok", False), (137, "killed", True)], [], False, id="a-machine-lost-at-the-end"),
        pytest.param(143, 143, [(75, "gave_up", False), (143, "stopped", True)], [USR1], False, id="gave-up"),
        pytest.param(143, 143, [(143, "stopped", True)], [USR1, USR2], False, id="stopped-by-somebody"),
        pytest.param(138, 138, [(138, "error", False)], [USR1], True, id="warned"),
    ],
)
def test_the_outcomes_of_the_nodes_decide_on_a_requeue(
    step, slurm, tmp_path, monkeypatch, end, code, outcomes, signals, requeued
):
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    for node, (number, cause, retry) in enumerate(outcomes):
        (folder := tmp_path / f"node-{node}").mkdir()
        Outcome(code=number, cause=cause, message="", retry=retry).write(folder)

    def wait(_, is_main=False):
        for number in signals if is_main else ():
            step._receive(number)
            step._wanted = 0
        return end if is_main else 0

    monkeypatch.setattr(step, "_wait", wait)
    slurm("scontrol", "")
    for _ in range(2):
        assert step.run() == code
        assert (tmp_path / "scontrol.calls").exists() == requeued
        (tmp_path / "scontrol.calls").unlink(missing_ok=True)
        step._requeues, requeued = 1, False  # its limit


@pytest.mark.parametrize(("end", "code"), [(66, 66), (1, 69)])
def test_a_node_that_cannot_run_ddprun_is_the_outcome(step, slurm, tmp_path, end, code):
    slurm("srun", f"exit {end}")
    assert step.run() == code
    outcome = read_outcome((tmp_path / "node-0" / OUTCOME).read_text())
    assert (outcome.code, outcome.cause) == (code, "unavailable")


def test_a_stop_ends_a_check_of_the_nodes_that_waits(
    step: batch.BatchStep, slurm: Callable[[str, str], None], tmp_path: Path
) -> None:
    slurm("srun", "kill -s USR2 $PPID; exec sleep 600")
    assert step.run() == 143
    assert (tmp_path / "srun.calls").read_text().count("\n") == 1  # no rank was started


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
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert batch.check_node(tmp_path / "token") == 66  # no torch


@pytest.mark.parametrize(("number", "sent"), [("", []), ("1", ["7.1"])])
def test_signal_is_not_sent_to_a_step_without_a_number(
    number: str, sent: list[str], step: batch.BatchStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    def ask(*command: str) -> "subprocess.CompletedProcess[str]":
        commands.append(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(batch, "ask", ask)
    monkeypatch.setattr(batch, "POLL_S", 0.01)
    (tmp_path / "step").write_text(number)
    step._receive(USR1)
    assert step._wait(["/bin/sleep", "0.3"], is_main=True) == 0
    assert commands == sent
