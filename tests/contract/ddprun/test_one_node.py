"""One ddprun and its ranks: nothing outlives it, and signals reach who they are meant for."""

import os
import random
import signal
import time

import psutil
import pytest

from ddprun.termination import SAME_REQUEST_S
from ddpwire import log_record
from ddpwire.events import EVENTS
from ddpwire.run_files import Outcome

EXECUTED = (
    "test_whichever_process_is_killed_nothing_is_left",
    "test_sigterm_at_any_moment",
    "test_a_second_signal_kills_at_once",
    "test_ctrl_c_is_a_keyboard_interrupt_and_130",
)


@pytest.mark.parametrize("victim", ["ddprun", "supervisor", "rank"])
def test_whichever_process_is_killed_nothing_is_left(runs, victim):
    node = runs.start("act.py", "all=family", options=("--nproc-per-node", "2", "--max-restarts", "0"))
    runs.wait_until_ready(node)
    runs.until(lambda: len(runs.alive()) == 2 + 2 * 4)
    supervisor = psutil.Process(node.process.pid).children()[0]
    pids = {"ddprun": node.process.pid, "supervisor": supervisor.pid, "rank": node.rank_pid(0)}
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "ddprun":
        assert runs.nothing_is_left()
        return
    assert node.end() == 137
    assert runs.nothing_is_left()
    if victim == "supervisor":  # both ranks fell at once
        assert node.outcome().code == 137
        assert "supervisor" in node.messages()[1]
    else:
        assert node.facts() == Outcome(code=137, cause="killed", message="", node=0, rank=0, retry=True)


LEFT_ALONE = """
import os, sys, time
while os.environ["RANK"] == "0":
    with open(os.environ["DDP_EVENTS_FILE"]) as events:
        if '"rank_exited"' in events.read():
            raise RuntimeError("Connection closed by peer")
    time.sleep(0.02)
"""


def test_a_rank_that_exits_with_0_before_another_fails_is_named(runs, tmp_path):
    (tmp_path / "script.py").write_text(LEFT_ALONE)
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"))
    assert node.end() == 1
    assert node.facts() == Outcome(code=1, cause="error", message="", node=0, rank=0)
    assert "rank 1 had exited with 0" in node.outcome().message
    assert "RuntimeError: Connection closed by peer" in node.outcome().message


@pytest.mark.parametrize("moment", ["at once", "a while", "ready"])
def test_sigterm_at_any_moment(runs, moment):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2"))
    if moment == "ready":
        runs.wait_until_ready(node)
    else:
        runs.until((node.folder / "node.json").exists)
        time.sleep(0 if moment == "at once" else random.uniform(0.1, 3.0))
    node.process.terminate()
    assert node.end() == 143
    assert runs.nothing_is_left()
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


@pytest.mark.parametrize("files", [(".lock",), (".lock", "last.pt")], ids=["empty", "checkpoint"])
def test_a_resumed_run_without_a_checkpoint_says_so(runs, tmp_path, files):
    (tmp_path / "night").mkdir()
    for name in files:
        (tmp_path / "night" / name).touch()
    env = {"DDP_CHECKPOINT_DIR": str(tmp_path / "night")}
    node = runs.start("act.py", "all=0", options=("--resumes", "night"), env=env)
    assert node.end() == 0
    named = [line for line in node.messages() if f"{tmp_path}/night" in line and "'night'" in line]
    assert len(named) == (len(files) == 1)


def test_a_second_signal_kills_at_once(runs):
    node = runs.start("act.py", "all=deaf", options=("--grace", "60"))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGTERM)
    runs.until(lambda: any("SIGTERM: the ranks have 60 s" in line for line in node.messages()))
    time.sleep(2 * SAME_REQUEST_S)
    node.process.send_signal(signal.SIGINT)
    assert node.end(55) == 143  # before its grace is over


def test_a_signal_that_is_delivered_twice_is_one_request(runs):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2", "--grace", "60"))
    runs.until(lambda: all(node.log(rank).startswith("ready") for rank in range(2)))
    for _ in range(2):
        node.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert node.end(55) == 143
    assert not [line for line in node.messages() if "again" in line]


INTERRUPTED = """\
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {end}
"""


@pytest.mark.parametrize("options", [(), ("--exec",)], ids=["forked", "executed"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(5)", "raise"])
def test_ctrl_c_is_a_keyboard_interrupt_and_130(runs, tmp_path, end, options):
    (tmp_path / "script.py").write_text(INTERRUPTED.format(end=end))
    node = runs.start(str(tmp_path / "script.py"), options=options)
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGINT)
    assert node.end() == 130
    assert node.log(0).splitlines()[:2] == ["ready", "interrupted"]
    assert node.outcome().cause == "stopped"


def test_a_second_ctrl_c_kills_and_is_137(runs, tmp_path):
    (tmp_path / "script.py").write_text(INTERRUPTED.format(end="time.sleep(60)"))
    node = runs.start(str(tmp_path / "script.py"), options=("--grace", "60"))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGINT)
    runs.until(lambda: "interrupted" in node.log(0))
    time.sleep(2 * SAME_REQUEST_S)
    node.process.send_signal(signal.SIGINT)
    assert node.end(55) == 137
    assert node.outcome().cause == "stopped"
    assert "SIGINT" in node.outcome().message


SAVES = """\
import os, signal, sys, time
from ddpwire.heartbeat import Heart

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


def test_a_killed_supervisor_is_replaced_when_there_are_restarts(runs):
    node = runs.start("act.py", "0=family", "again=0", options=("--max-restarts", "1"))
    runs.until(lambda: len(runs.alive()) == 2 + 4)
    psutil.Process(node.process.pid).children()[0].kill()
    assert node.end() == 0
    assert node.outcome().attempt == 2
    assert any("exec" in line for line in node.messages()), "nothing is left that has imported torch"


@pytest.mark.parametrize(
    ("deed", "option", "code"),
    [("0=3", "--max-restarts", 0), ("0=66", "--max-restarts", 66), ("0=3", "--restart-limit", 3)],
)
def test_max_restarts_is_torchruns(runs, deed, option, code):
    node = runs.start("act.py", deed, "again=0", options=(option, "1"))
    assert node.end() == code
    assert node.outcome().attempt == (1 if code else 2)


def test_torchruns_role_virtual_local_rank_and_run_path(runs, tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES', 'ROLE_NAME', 'ROLE_RANK', 'ROLE_WORLD_SIZE')\n"
        "open(os.environ['RANK'], 'w').write(str([__name__, sys.argv[1:], *(os.environ[name] for name in names)]))\n"
    )
    flags = ("--nproc-per-node", "2", "--role", "trainer", "--virtual-local-rank", "--run-path")
    node = runs.start(script, "--lr", "1", options=flags, env={"CUDA_VISIBLE_DEVICES": "5, 7"}, cwd=tmp_path)
    assert node.end() == 0
    shown = [(tmp_path / rank).read_text() for rank in "01"]
    assert shown == [
        str(["__main__", ["--lr", "1"], rank, "0", gpu, "trainer", rank, "2"]) for rank, gpu in (("0", "5"), ("1", "7"))
    ]
