"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

import os
import signal
from dataclasses import replace

from ddprun.settings import requeue
from ddprun.settings.requeue import Requeues, newest_checkpoint
from ddprun.system.file_writer import FileWriter
from ddpwire.run_files import Outcome

STOPPED = Outcome(code=143, cause="stopped", message="stopped by SIGTERM", node=0, rank=1, retry=True)


def start(tmp_path, *, is_first=False):
    return Requeues(tmp_path, tmp_path / "checkpoints", is_first=is_first, files=FileWriter())


def limit(requeues, outcome):
    assert requeues.is_ready()
    return requeues.limit(outcome)


def test_three_starts_without_a_new_checkpoint_end_a_requeued_job(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for first in (True, False):  # the first start of another job in the same folder counts from 1 again
        outcomes = [limit(start(tmp_path, is_first=number == 1), STOPPED) for number in (1, 2, 3)]
        assert [(outcome.code, outcome.cause, outcome.retry) for outcome in outcomes] == [
            (143, "stopped", True), (143, "stopped", True), (75, "gave_up", False)
        ], first  # fmt: skip
    assert outcomes[2].message.endswith(STOPPED.message)
    last = start(tmp_path)
    (tmp_path / "checkpoints/.step-7.pt.new").touch()  # not whole yet
    assert limit(last, STOPPED).code == 75
    (tmp_path / "checkpoints/step-7.pt").touch()
    assert limit(last, STOPPED) == STOPPED
    assert newest_checkpoint(tmp_path / "checkpoints").endswith(" step-7.pt")
    again = start(tmp_path)
    os.utime(tmp_path / "checkpoints/step-7.pt", (1, 1))  # written again
    assert limit(again, STOPPED) == STOPPED


def test_what_no_requeue_would_help_stays_as_it_is(tmp_path):
    requeues = [start(tmp_path) for _ in range(5)][-1]
    error = replace(STOPPED, code=3, cause="error", retry=False)
    assert limit(requeues, error) == error
    assert limit(start(tmp_path / "nowhere"), STOPPED) == STOPPED  # nothing can be counted there


def test_a_disk_that_does_not_answer_holds_up_no_decision(tmp_path, monkeypatch):
    [start(tmp_path) for _ in range(2)]
    writer = FileWriter(fork=True)
    last = Requeues(tmp_path, tmp_path / "checkpoints", is_first=False, files=writer)
    writer.start()
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        assert not last.is_ready(), "unknown for now"
        monkeypatch.setattr(requeue, "ANSWER_S", 0.0)
        assert limit(last, STOPPED) == STOPPED
    finally:
        os.kill(writer.pid, signal.SIGKILL)
