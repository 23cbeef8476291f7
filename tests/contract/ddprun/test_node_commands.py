"""node_setup, node_teardown and the stop signal; and nodectl's verbs on a node that runs."""

import json
import signal
import subprocess

import pytest
from tests.contract.ddprun.test_exit_codes import ended
from tests.messages import assert_names
from tests.unit.ddprun.test_nodectl import NODECTL, nodectl

from ddpwire.run_files import Outcome


def commands(setup="", teardown="", *, timeout=30):
    """The options of a node that runs both commands."""
    limits = ("--setup-timeout", str(timeout), "--teardown-timeout", str(timeout))
    return (*limits, "--node-setup", setup or "true", "--node-teardown", teardown or "true")


def test_both_commands_run_once_on_each_node_in_the_environment_of_the_job(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_JOB_ENV", '{"JOB": "x"}')
    note = f'echo "$NODE_RANK $JOB $DDP_RUN_DIR ${{PET_NNODES-}}${{RANK-}}" >>{tmp_path}'
    options = commands(
        f"{note}/setup; sleep 600 & setsid -f sleep 600 >/dev/null 2>&1",
        f"{note}/teardown; echo $DDP_EXIT_CODE >>{tmp_path}/code",
    )
    nodes = runs.pair("act.py", "1=3", options=options)
    assert ended(*nodes) == (3, "error", 1, 1)
    for name in ("setup", "teardown"):
        assert sorted((tmp_path / name).read_text().splitlines()) == [f"{node} x {runs.run_dir} " for node in (0, 1)]
    assert (tmp_path / "code").read_text() == "3\n3\n"
    assert runs.remaining() == []


def test_no_restart_runs_setup_again(runs, tmp_path):
    setup = f"echo set up >>{tmp_path}/setup"
    node = runs.start("act.py", "0=-9", "again=0", options=commands(setup))
    assert (node.end(), node.outcome().attempt) == (0, 2)
    assert (tmp_path / "setup").read_text() == "set up\n"


def test_a_failed_setup_ends_all_nodes_before_ranks_start(runs, tmp_path):
    setup = "[ $NODE_RANK = 0 ] || exit 23"
    nodes = runs.pair("act.py", "all=0", options=commands(setup, f"touch {tmp_path}/$NODE_RANK"))
    assert ended(*nodes) == (23, "setup", 1, None)
    assert not list(runs.run_dir.glob("node-*/rank-*.log"))
    assert {path.name for path in tmp_path.glob("[01]")} == {"0", "1"}
    assert_names(nodes[0].outcome().message, setup, "node 1", "23")


def test_ranks_start_only_when_all_nodes_are_set_up(runs, tmp_path):
    setup = f"[ $NODE_RANK = 0 ] || until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    nodes = runs.pair("act.py", "all=0", options=commands(setup))
    runs.until(lambda: "node_setup: done" in nodes[0].stderr.read_text())
    runs.until(lambda: nodes[1].state().state == "starting")
    assert not list(runs.run_dir.glob("node-*/rank-*.log"))
    (tmp_path / "go").touch()
    assert ended(*nodes)[:2] == (0, "ok")


def test_a_setup_that_takes_too_long_is_killed_with_its_children(runs):
    node = runs.start("act.py", "all=0", options=commands("sleep 600 & sleep 600", timeout=1))
    assert (node.end(), node.outcome().cause) == (1, "setup")
    assert runs.remaining() == []


def test_a_stop_during_setup_ends_it(runs):
    node = runs.start("act.py", "all=0", options=commands("sleep 600; true"))
    runs.until(lambda: "node_setup: sleep" in node.stderr.read_text())
    node.process.terminate()
    assert (node.end(), node.outcome().cause) == (143, "stopped")
    assert runs.remaining() == []


def test_a_failed_teardown_changes_no_exit_code_and_is_logged(runs):
    node = runs.start("act.py", "all=0", options=commands("", "exit 9"))
    assert (node.end(), node.outcome().code) == (0, 0)
    assert_names(node.stderr.read_text(), "exit 9", "exited with 9", "still 0")


@pytest.mark.parametrize(("name", "code"), [("USR1", 138), ("USR2", 140)])
def test_the_stop_signal_reaches_the_ranks_in_place_of_sigterm(runs, name, code):
    nodes = runs.pair("act.py", "all=save", options=("--stop-signal", name))
    runs.wait_until_ready(*nodes)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert ended(*nodes)[:2] == (code, "stopped")
    assert [node.log(rank) for rank, node in enumerate(nodes)] == [f"ready\nsaved on SIG{name}\n"] * 2


def test_show_and_signal_a_node(runs):
    node = runs.start("act.py", "all=deaf", options=("--nproc-per-node", "2"))
    runs.wait_until_ready(node)

    def read_state():
        return json.loads((node.folder / "node.json").read_text())

    def look():
        """A state, and what is shown of it, if it did not change meanwhile."""
        state, (code, shown, _) = read_state(), nodectl("show", node.folder)
        status = json.loads(shown)
        return state == read_state() and status["history"].count("\n") > 1 and (state, code, status)

    runs.until(lambda: read_state()["state"] == "training")
    state, code, status = runs.until(look)
    head, *rows = status.pop("history").splitlines()
    known = (node.folder / "history.csv").read_text().splitlines()
    assert head == known[0]
    assert rows
    assert {*rows} <= {*known}
    assert (code, status) == (
        0,
        {"dir": str(node.folder), "gone": False, "alive": True, "node": state, "outcome": None, "remains": False},
    )
    assert (state["pid"], state["state"]) == (node.process.pid, "training")
    code, answer, _ = nodectl("signal", "--signal", "KILL", "--wait", "60", node.folder)
    assert (code, json.loads(answer)) == (0, {"dir": str(node.folder), "signalled": True, "alive": False})
    assert runs.alive() == []
    assert node.facts() == Outcome(code=137, cause="stopped", message="", retry=True, attempt=1)
    code, answer, _ = nodectl("signal", node.folder)
    assert (code, json.loads(answer)) == (0, {"dir": str(node.folder), "signalled": False, "alive": False})


def test_following_ends_with_the_run_and_loses_nothing(runs):
    node = runs.start("say.py")
    runs.until((node.folder / "rank-0.log").exists)  # nodectl waits 10 s for it
    done = subprocess.run(
        [*NODECTL, "logs", "-f", "--rank", "0", str(runs.run_dir)], capture_output=True, timeout=240, check=False
    )
    assert node.end() == 0
    lines = [f"[node0 rank0] {line}" for line in node.log(0).splitlines()]
    assert done.stdout.decode().splitlines() == lines
