"""What a launcher asks and tells the ddpruns of a machine: real ones where it matters."""

import json
import subprocess
import sys

NODECTL = [sys.executable, "-m", "ddprun.nodectl"]


def nodectl(*args, **kw):
    """Exit code, stdout and stderr."""
    done = subprocess.run([*NODECTL, *map(str, args)], capture_output=True, text=True, timeout=240, check=False, **kw)
    return done.returncode, done.stdout, done.stderr


def test_show_and_signal_a_node(runs):
    node = runs.start("act.py", "all=deaf", options=("--nproc-per-node", "2"))
    runs.wait_until_ready(node)

    def read_state():
        return json.loads((node.folder / "node.json").read_text())

    def look():
        """A state, and what is shown of it, if it did not change meanwhile."""
        state, (code, shown, _) = read_state(), nodectl("show", node.folder)
        found = json.loads(shown)
        return state == read_state() and found["history"].count("\n") > 1 and (state, code, found)

    runs.until(lambda: read_state()["state"] == "training")
    state, code, found = runs.until(look)
    head, *rows = found.pop("history").splitlines()
    known = (node.folder / "history.csv").read_text().splitlines()
    assert head == known[0]
    assert rows
    assert {*rows} <= {*known}
    assert (code, found) == (
        0,
        {"dir": str(node.folder), "gone": False, "alive": True, "node": state, "outcome": None, "remains": False},
    )
    assert (state["pid"], state["state"]) == (node.process.pid, "training")
    code, told, _ = nodectl("signal", "--signal", "KILL", "--wait", "60", node.folder)
    assert (code, json.loads(told)) == (0, {"dir": str(node.folder), "signalled": True, "alive": False})
    assert runs.alive() == []
    outcome = json.loads((node.folder / "outcome.json").read_text())
    assert outcome.pop("message")
    assert outcome == {
        "code": 137,
        "cause": "stopped",
        "node": None,
        "rank": None,
        "step": None,
        "retry": True,
        "attempt": 1,
    }
    code, told, _ = nodectl("signal", node.folder)
    assert (code, json.loads(told)) == (0, {"dir": str(node.folder), "signalled": False, "alive": False})


def test_following_ends_with_the_run_and_loses_nothing(runs):
    node = runs.start("say.py")
    runs.until((node.folder / "rank-0.log").exists)  # nodectl waits 10 s for it
    done = subprocess.run(
        [*NODECTL, "logs", "-f", "--rank", "0", str(runs.run_dir)], capture_output=True, timeout=240, check=False
    )
    assert node.end() == 0
    lines = [f"[node0 rank0] {line}" for line in node.log(0).splitlines()]
    assert done.stdout.decode().splitlines() == lines
