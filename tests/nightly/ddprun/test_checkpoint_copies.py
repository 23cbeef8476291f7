"""Copies of node 0's checkpoints: both sides in this process, over real sockets and a signed store."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddprun import test_checkpoint_copies
from tests.unit.ddprun.test_checkpoint_copies import SECRET, Nodes, announced
from torch.distributed import TCPStore

from ddprun.files import checkpoint_copies
from ddprun.files.checkpoint_copies import ANNOUNCED, CHUNK_BYTES, finish_copy, read_manifest
from ddprun.system import stores
from ddpwire.run_files import COPY, COPY_PART

nodes = test_checkpoint_copies.nodes  # the fixture


def test_only_the_first_nodes_of_an_attempt_keep_copies(nodes):
    nodes.members = (0, 2)
    nodes.start(0)
    nodes.start(1)
    nodes.start(2)
    nodes.save(1)
    until(lambda: nodes.has(2, 1))
    assert not nodes.content(1)


@pytest.mark.parametrize("forgery", ["unsigned", "other port", "other content"])
def test_without_the_secret_nothing_is_planted(nodes, forgery):
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
    if forgery == "unsigned":
        nodes.store.set(ANNOUNCED, theirs)
    else:  # what a program that answers on node 0's port could do
        if forgery == "other content":
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


def test_a_copy_from_a_lost_node_0_writes_nothing_into_the_folder_of_the_next_copy(nodes, monkeypatch):
    """A cable that is mended: the copy from the old node 0 goes on while that from the new one begins."""
    source, _ = nodes.start(0)
    nodes.save(1, data=os.urandom(3 << 20))
    has_begun, go = threading.Event(), threading.Event()

    class Pause:
        def __enter__(self):
            has_begun.set()
            go.wait(60)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(source, "_pacing", Pause())
    copy, journal = nodes.start(1)
    assert has_begun.wait(60)
    copy.close()
    before = sorted(nodes.folder_of(1).rglob("*"))
    go.set()
    until(lambda: journal.of("checkpoint_failed"))
    assert sorted(nodes.folder_of(1).rglob("*")) == before
