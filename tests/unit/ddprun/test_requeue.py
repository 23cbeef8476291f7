"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

import os
from dataclasses import replace

from ddprun.settings.requeue import Requeues, newest_checkpoint
from ddpwire.run_files import Outcome

STOPPED = Outcome(code=143, cause="stopped", message="stopped by SIGTERM", node=0, rank=1, retry=True)


def start(tmp_path, *, is_first=False):
    return Requeues(tmp_path, tmp_path / "checkpoints", is_first=is_first)


def test_three_starts_without_a_new_checkpoint_end_a_requeued_job(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for first in (True, False):  # the first start of another job in the same folder counts from 1 again
        outcomes = [start(tmp_path, is_first=number == 1).limit(STOPPED) for number in (1, 2, 3)]
        assert [(outcome.code, outcome.cause, outcome.retry) for outcome in outcomes] == [
            (143, "stopped", True), (143, "stopped", True), (75, "gave_up", False)
        ], first  # fmt: skip
    assert outcomes[2].message.endswith(STOPPED.message)
    last = start(tmp_path)
    (tmp_path / "checkpoints/.step-7.pt.new").touch()  # not whole yet
    assert last.limit(STOPPED).code == 75
    (tmp_path / "checkpoints/step-7.pt").touch()
    assert last.limit(STOPPED) == STOPPED
    assert newest_checkpoint(tmp_path / "checkpoints").endswith(" step-7.pt")
    again = start(tmp_path)
    os.utime(tmp_path / "checkpoints/step-7.pt", (1, 1))  # written again
    assert again.limit(STOPPED) == STOPPED


def test_what_no_requeue_would_help_stays_as_it_is(tmp_path):
    requeues = [start(tmp_path) for _ in range(5)][-1]
    error = replace(STOPPED, code=3, cause="error", retry=False)
    assert requeues.limit(error) == error
    assert start(tmp_path / "nowhere").limit(STOPPED) == STOPPED  # nothing can be counted there
