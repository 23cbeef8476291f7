"""Signals, the deadline and the launcher's end: who is told, and which exit code follows."""

import os
import re
import signal
import time

import pytest
from tests.messages import assert_names

from ddprun.ranks.termination import SAME_REQUEST_S
from ddpwire import log_record
from ddpwire.events import EVENTS, read_events
from ddpwire.run_files import Outcome


@pytest.mark.parametrize("moment", ["at once", "ready"])
def test_sigterm_at_any_moment(runs, moment):
    runs.executed = moment == "at once"  # while it imports torch
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2"))
    if moment == "ready":
        runs.wait_until_ready(node)
    else:
        runs.until((node.folder / "node.json").exists)
    node.process.terminate()
    assert node.end() == 143
    assert runs.remaining() == []
    if moment == "ready":
        assert node.outcome().cause == "stopped"
        assert node.log(0) == "ready\nsaved on SIGTERM\n"


def test_usr1_reaches_the_ranks_and_never_kills_ddprun(runs):
    node = runs.start("act.py", "all=save", env={"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGUSR1)
    assert node.end() == 138
    log = node.stderr.read_text()
    assert log_record.unpack(log)[EVENTS] == (node.folder / EVENTS).read_text()  # in a pod nothing else is left
    assert not log_record.LINE.match(log.splitlines()[-1])
    assert node.facts() == Outcome(code=138, cause="stopped", message="", node=0, rank=0, retry=True)
    assert "SIGUSR1" in node.outcome().message


def test_a_rank_that_ignores_signals_is_killed_when_its_grace_is_over(runs):
    node = runs.start("act.py", "all=deaf", options=("--grace", "0.5"))
    runs.wait_until_ready(node)
    node.process.terminate()
    assert node.end() == 143
    assert (node.outcome().cause, node.outcome().rank) == ("stopped", 0)
    assert "SIGTERM" in node.outcome().message


def test_a_second_signal_kills_at_once(runs):
    node = runs.start("act.py", "all=deaf", options=("--grace", "60"))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGTERM)
    runs.until(lambda: node.state().state == "stopping")
    time.sleep(2 * SAME_REQUEST_S)
    node.process.send_signal(signal.SIGINT)
    assert node.end(55) == 143  # before its grace is over


SAVES_LATER = """\
import os, signal, sys
def save(number, _):
    print("saving", flush=True)
    os.read(os.open("go", os.O_RDONLY), 1)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda number, _: print("USR1", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_second_sigterm_of_slurm_within_seconds_is_the_same_request(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("go")
    (tmp_path / "later.py").write_text(SAVES_LATER)
    node = runs.start(str(tmp_path / "later.py"), options=("--grace", "60"), env={"DDP_LAUNCHER": "slurm"})
    runs.wait_until_ready(node)
    node.process.terminate()
    runs.until(lambda: "saving" in node.log(0))
    time.sleep(2 * SAME_REQUEST_S)
    node.process.terminate()
    node.process.send_signal(signal.SIGUSR1)  # ddprun handles signals in their order
    runs.until(lambda: "USR1" in node.log(0) or node.process.poll() is not None)
    assert "USR1" in node.log(0)
    (tmp_path / "go").write_text("x")
    assert node.end(55) == 143
    assert (node.outcome().cause, node.outcome().retry) == ("stopped", True)


INTERRUPTED = """\
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {end}
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(5)", 130), ("time.sleep(60)", 137)], ids=["once", "twice"])
def test_ctrl_c_is_a_keyboard_interrupt_and_a_second_one_kills(runs, tmp_path, end, code):
    (tmp_path / "script.py").write_text(INTERRUPTED.format(end=end))
    node = runs.start(str(tmp_path / "script.py"), options=("--grace", "60"))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGINT)
    runs.until(lambda: "interrupted" in node.log(0))
    if code == 137:
        time.sleep(2 * SAME_REQUEST_S)
        node.process.send_signal(signal.SIGINT)
    assert node.end(55) == code
    assert node.log(0).splitlines()[:2] == ["ready", "interrupted"]
    assert (node.outcome().cause, "SIGINT" in node.outcome().message) == ("stopped", True)


SAVES = """\
import os, signal, sys, time
from ddprank.heartbeat import Heart

def save(number, frame):
    sys.exit()  # after a checkpoint

signal.signal(signal.SIGTERM, save)
if sys.argv[1:] == ["complete"]:
    Heart(os.environ["DDP_HEARTBEAT_FILE"]).complete()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("arguments", "code"), [((), 143), (("complete",), 0)], ids=["saved", "complete"])
def test_ranks_that_exit_with_0_after_a_stop_have_succeeded_where_their_training_is_complete(
    runs, tmp_path, arguments, code
):
    (tmp_path / "script.py").write_text(SAVES)
    node = runs.start(str(tmp_path / "script.py"), *arguments)
    runs.wait_until_ready(node)
    node.process.terminate()
    assert node.end() == code
    assert node.outcome().cause == ("stopped" if code else "ok")


def test_the_end_of_the_lifeline_is_a_stop(runs):
    read, write = os.pipe()
    node = runs.start("act.py", "all=save", env={"DDP_LIFELINE_FD": str(read)}, pass_fds=(read,))
    os.close(read)
    runs.wait_until_ready(node)
    os.close(write)
    assert node.end() == 143
    assert node.log(0) == "ready\nsaved on SIGTERM\n"
    assert (node.outcome().cause, "SIGTERM" in node.outcome().message) == ("stopped", False)


def test_ranks_save_before_the_deadline(runs):
    """Unit tests have the deadline at a time of day: here it counts from the start, which may come late."""
    node = runs.start("act.py", "all=save", options=("--grace", "0.9"), env={"DDP_DEADLINE": "8"})
    assert node.end() == 143
    assert node.log(0) in ("", "ready\nsaved on SIGTERM\n")  # on a busy machine no rank may be ready by then
    assert (node.outcome().cause, node.outcome().code, node.outcome().retry) == ("stopped", 143, True)
    assert any("DDP_DEADLINE" in line for line in node.messages())


@pytest.mark.parametrize("by", ["deadline", "SIGTERM"])
def test_a_stop_is_named_by_what_reached_ddprun_and_by_what_the_ranks_get(runs, by):
    env = {"DDP_DEADLINE": "25"} if by == "deadline" else {}
    node = runs.start("act.py", "all=save", options=("--grace", "10", "--stop-signal", "USR2"), env=env)
    runs.wait_until_ready(node)
    if by == "SIGTERM":
        node.process.terminate()
    assert node.end() == 140
    (event,) = [event for event in read_events("", (node.folder / EVENTS).read_text()) if event.event == "signal"]
    assert (event.facts["sent"], event.facts.get("signal")) == ("SIGUSR2", None if by == "deadline" else by)
    counts = re.findall(
        r'^ddp_termination_signals_total\{signal="(\w+)"\} 1', (node.folder / "metrics.prom").read_text(), re.M
    )
    assert counts == ([] if by == "deadline" else [by])
    (line,) = [line for line in node.messages() if "SIGUSR2" in line and "10 s" in line]
    assert_names(line, by)
    assert_names(node.outcome().message, by, "SIGUSR2")
