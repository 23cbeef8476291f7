"""Values in the run's store that no ddprun of the run has written."""

import json
import os

import pytest
from tests import forks

from ddpwire.exits import Exit

# Prints the value that node 1 has written last, and writes another one: again, as the node's own heartbeat does.
FORGE = """\
import sys, time
from torch.distributed import DistNetworkError, TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False)
print(store.get("beat/1").decode())
try:
    while True:
        store.set("beat/1", sys.argv[3])
        time.sleep(0.02)
except DistNetworkError:
    pass  # node 0 has ended
"""


def forge(nodes, value):
    """Write a value for the heartbeat of node 1 until node 0 ends. Return the heartbeat that was there before."""
    place = nodes[0].state().master.split(":")
    done = forks.run(["-c", FORGE, *place, value], env=os.environ, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SECRET = "0123456789abcdef"  # noqa: S105


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_a_run_with_a_secret_signs_and_ends_at_a_forged_value(runs, secret, monkeypatch):
    monkeypatch.setenv("DDP_SECRET_FILE", str(secret))
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    assert forge(nodes, json.dumps({"at": 1, "attempt": 0, "signs": []})).startswith("hmac-sha256:")
    assert SECRET not in "".join(path.read_text(errors="replace") for path in runs.run_dir.rglob("*") if path.is_file())
    assert (nodes[0].end(), nodes[0].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "beat/1" in nodes[0].outcome().message
    assert nodes[1].end() == Exit.KILLED
    assert runs.remaining() == []


def test_a_node_without_the_secret_of_the_others_is_told(runs, secret):
    port = runs.free_port()
    first = runs.start("act.py", nodes="2", port=port, env={"DDP_SECRET_FILE": str(secret)})
    second = runs.start("act.py", node=1, nodes="2", port=port)
    assert second.end() == Exit.CONFIG
    assert "DDP_SECRET_FILE" in second.outcome().message
    first.process.terminate()
    first.end()
    assert runs.remaining() == []
