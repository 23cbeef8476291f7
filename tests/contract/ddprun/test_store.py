"""Values in the run's store that no ddprun of the run has written."""

import contextlib
import json
import time

import pytest
from torch.distributed import DistNetworkError, TCPStore

from ddprun.system import stores
from ddpwire.exits import Exit


def test_a_node_that_reads_such_a_value_ends_with_an_outcome(runs):
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    host, port = nodes[0].state().master.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    with contextlib.suppress(DistNetworkError):  # node 0 has ended
        while nodes[0].process.poll() is None:
            store.set("beat/1", "not json")  # again: the node's own heartbeat writes over it
            time.sleep(0.02)
    assert (nodes[0].end(), nodes[0].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "beat/1" in nodes[0].outcome().message
    assert nodes[1].end() == Exit.KILLED
    assert runs.remaining() == []


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
    host, port = nodes[0].state().master.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    assert store.get("beat/1").startswith(stores.SIGNED)
    assert SECRET not in "".join(path.read_text(errors="replace") for path in runs.run_dir.rglob("*") if path.is_file())
    with contextlib.suppress(DistNetworkError):
        while nodes[0].process.poll() is None:
            store.set("beat/1", json.dumps({"at": 1, "attempt": 0, "signs": []}))
            time.sleep(0.02)
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
