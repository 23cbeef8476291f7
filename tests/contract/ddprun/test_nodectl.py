"""What a launcher asks and tells the ddpruns of a machine."""

import json
import subprocess

from tests.unit.ddprun.test_nodectl import NODECTL, nodectl

from ddpwire.run_files import Outcome


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
