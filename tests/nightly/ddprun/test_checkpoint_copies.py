"""Copies of node 0's checkpoints: both sides in this process, over real sockets and a signed store."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fixtures.nodes import until
from torch.distributed import HashStore, TCPStore

from ddprun import checkpoint_copies, stores
from ddprun.checkpoint_copies import ANNOUNCED, CHUNK_BYTES, PROOF, finish_copy, read_manifest, start_copies
from ddpwire.events import EVENTS, EventLog
from ddpwire.run_files import COPY, COPY_PART

SECRET = b"0123456789abcdef"


class Journal:
    """What a node logs and emits."""

    def __init__(self):
        self.lines, self.events = [], []

    def log(self, line):
        self.lines.append(line)

    def emit(self, event, **facts):
        self.events.append((event, facts))

    def of(self, event):
        return [facts for kind, facts in self.events if kind == event]


class Nodes:
    """A run whose nodes have a folder each."""

    def __init__(self, folder: Path, store=None):
        self.folder, self.store, self.members = folder, store or HashStore(), (0, 1)
        self.events = EventLog(folder / "node-0" / EVENTS, node=0, rank=0)
        (folder / "node-0").mkdir(parents=True, exist_ok=True)

    def folder_of(self, node):
        return self.folder / f"box{node}"

    def start(self, node, *, secret=SECRET, copies=2):
        self.folder_of(node).mkdir(exist_ok=True)
        config = SimpleNamespace(
            checkpoint_dir=str(self.folder_of(node)),
            checkpoint_copies=copies,
            max_nodes=3,
            node_rank=node,
            secret=secret,
            run_id="night",
        )
        journal = Journal()
        store = SimpleNamespace(clone=lambda: stores.SignedStore(self.store, secret, "night"))
        node_dir = self.folder / "node-0"
        return start_copies(config, "127.0.0.1", store, lambda: self.members, journal, node_dir), journal

    def save(self, step, *, keep=2, data=b""):
        """As ddptrain does: the data, the deletion of an old one, the event."""
        folder = self.folder_of(0)
        (folder / f"step-{step}.pt").write_bytes(data or os.urandom(5000))
        (folder / "latest").write_text(f"step-{step}.pt")
        for old in sorted(folder.glob("step-*"))[:-keep]:
            old.unlink()
        self.events.emit("checkpoint_saved", step=step)

    def content(self, node):
        paths = (path for path in self.folder_of(node).rglob("*") if not path.name.startswith("."))
        return {str(path.relative_to(self.folder_of(node))): path.read_bytes() for path in paths if path.is_file()}

    def has(self, node, step):
        return read_manifest(self.folder_of(node) / COPY).step == step and self.content(node) == self.content(0)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_copies, "POLL_S", 0.01)
    monkeypatch.setattr(checkpoint_copies, "RETRY_S", 0.01)
    return Nodes(tmp_path)


def test_only_the_first_nodes_of_an_attempt_keep_copies(nodes):
    nodes.members = (0, 2)
    nodes.start(0)
    nodes.start(1)
    nodes.start(2)
    nodes.save(1)
    until(lambda: nodes.has(2, 1))
    assert not nodes.content(1)


def announced(nodes):
    until(lambda: nodes.store.check([ANNOUNCED]))
    value = nodes.store.get(ANNOUNCED)
    return json.loads(value.partition(b" ")[2])


def get(port, path, proof=""):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={PROOF: proof} if proof else {})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_manifest_is_sent_whole_after_the_next_one_was_announced(nodes):
    """A node may still fetch it: neither another content nor a 404 may be reported as a failed copy."""
    nodes.folder_of(0).mkdir()
    nodes.save(1)  # before the start: node 0 could announce a part of it, and only the last two manifests are kept
    source, _ = nodes.start(0)
    place = announced(nodes)
    nodes.save(2)
    until(lambda: announced(nodes)["number"] > place["number"])
    status, body = get(place["port"], f"/{place['sha256']}", source.proof(place["nonce"], place["sha256"]))
    assert (status, hashlib.sha256(body).hexdigest()) == (200, place["sha256"])


@pytest.mark.parametrize("what", ["unsigned", "other port", "other content"])
def test_without_the_secret_nothing_is_planted(nodes, what):
    """The store has a forged announcement, or another program has node 0's port: the copy stays as it is."""
    nodes.start(0)
    _, journal = nodes.start(1)
    nodes.save(1)
    until(lambda: nodes.has(1, 1))
    before, place = nodes.content(1), announced(nodes)
    rogue = Nodes(nodes.folder / "rogue")
    rogue.start(0, secret=b"x" * 16)
    rogue.save(7, data=b"planted")
    until(lambda: rogue.store.check([ANNOUNCED]))
    theirs = rogue.store.get(ANNOUNCED)
    bad = json.loads(theirs.partition(b" ")[2])
    if what == "unsigned":
        nodes.store.set(ANNOUNCED, theirs)
    else:  # what a program that answers on node 0's port could do
        if what == "other content":
            bad |= {name: place[name] for name in ("sha256", "size", "nonce")}
        signed = stores.SignedStore(nodes.store, SECRET, "night")
        signed.set(ANNOUNCED, json.dumps(bad | {"number": 99}))
    until(lambda: journal.of("checkpoint_failed"))
    assert nodes.content(1) == before
    assert "the training is not affected" in journal.lines[0]


RECEIVER = """
import pathlib, sys, time
from torch.distributed import TCPStore
from tests.unit.ddprun.test_checkpoint_copies import Nodes
Nodes(pathlib.Path(sys.argv[1]), TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)).start(1)
time.sleep(600)
"""


def test_a_copy_that_was_cut_is_not_used(nodes, monkeypatch):
    """The process that receives is killed in the middle of a file; the previous copy is as it was."""
    monkeypatch.setattr(checkpoint_copies, "BYTES_PER_S", CHUNK_BYTES)  # one chunk a second
    nodes.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source, _ = nodes.start(0)
    command = [sys.executable, "-c", RECEIVER, str(nodes.folder), str(nodes.store.port)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as receiver:
        try:
            nodes.save(1)
            until(lambda: nodes.has(1, 1))
            before = nodes.content(1)
            nodes.save(2, data=os.urandom(8 * CHUNK_BYTES))
            part = nodes.folder_of(1) / ".step-2.pt.part"
            until(lambda: part.exists() and part.stat().st_size >= CHUNK_BYTES)
        finally:
            receiver.kill()
    assert nodes.content(1) == before
    assert (read_manifest(nodes.folder_of(1) / COPY).step, read_manifest(nodes.folder_of(1) / COPY_PART).step) == (1, 2)
    finish_copy(nodes.folder_of(1))
    assert nodes.content(1) == before
    assert not [path for path in nodes.folder_of(1).iterdir() if path.suffix == ".part"]
    nodes.start(1)
    source.finish(succeeded=True)  # without a limit of the rate
    assert nodes.has(1, 2)


def test_a_file_that_cannot_be_read_is_not_taken_for_deleted(tmp_path, monkeypatch):
    (tmp_path / "step-1.pt").write_bytes(b"weights")
    assert [file.path for file in checkpoint_copies.scan(tmp_path, 1, read_manifest(tmp_path)).files] == ["step-1.pt"]

    def broken(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_copies, "open_regular", broken)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint_copies.scan(tmp_path, 1, read_manifest(tmp_path))
