"""Copies of node 0's checkpoints: both sides in this process, over real sockets and a signed store."""

import hashlib
import json
import os
import shutil
import socket
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fixtures.nodes import until
from tests.messages import refused
from torch.distributed import HashStore

from ddprun.files import checkpoint_copies
from ddprun.files.checkpoint_copies import ANNOUNCED, PROOF, finish_copy, read_manifest, start_copies
from ddprun.system import stores
from ddprun.system.errors import NodeError
from ddpwire.events import EVENTS, EventLog
from ddpwire.exits import Exit
from ddpwire.run_files import COPY

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

    def start(self, node, *, secret=SECRET, copies=2, **named):
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
        node = SimpleNamespace(config=config, journal=journal, folder=SimpleNamespace(path=self.folder / "node-0"))
        members = lambda: self.members  # noqa: E731
        return start_copies(node, "127.0.0.1", store, members, **named), journal

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


def test_a_copy_follows_the_folder_of_node_0(nodes):
    (nodes.folder_of(0) / "shards").mkdir(parents=True)
    (nodes.folder_of(0) / "shards" / "0.bin").write_bytes(b"shard")
    (nodes.folder_of(0) / ".lock").touch()
    source, _ = nodes.start(0)
    copy, journal = nodes.start(1)
    third, _ = nodes.start(2)
    (nodes.folder_of(1) / "own.txt").write_text("a file of this node's ranks")
    for step in (1, 2, 3):
        nodes.save(step)
        expected = step
        until(lambda expected=expected: read_manifest(nodes.folder_of(1) / COPY).step == expected)
    for side in (source, copy, third):
        side.finish(succeeded=True)
    content = nodes.content(1)
    assert content.pop("own.txt")
    assert content == nodes.content(0)
    assert sorted(content) == ["latest", "shards/0.bin", "step-2.pt", "step-3.pt"]
    assert not list(nodes.folder_of(1).rglob("*.part"))
    assert not nodes.content(2), "node 2 keeps no copy"
    assert [facts["step"] for facts in journal.of("checkpoint_copied")][-1] == 3
    assert not journal.lines


def test_a_new_node_0_fetches_the_newest_copy_before_it_announces_anything(nodes, tmp_path):
    after, new, journal = new_node_0(nodes, tmp_path, {1: 3, 2: 5})
    assert (after.content(0), after.store.check([ANNOUNCED])) == ({}, False)
    new.restore()
    assert (after.content(0), read_manifest(after.folder_of(0) / COPY).step) == (nodes.content(0), 5)
    assert [facts["step"] for facts in journal.of("checkpoint_copied")] == [5]
    until(lambda: after.store.check([ANNOUNCED]))


def go_on():
    return False


def test_the_ranks_of_a_copying_node_start_with_the_newest_checkpoint(nodes, monkeypatch):
    """Without ``fill``, the copy would follow up to POLL_S later, and a script without ``saved`` is never copied."""
    monkeypatch.setattr(checkpoint_copies, "POLL_S", 3600.0)
    source, _ = nodes.start(0)
    nodes.folder_of(0).joinpath("last.pt").write_bytes(b"attempt 1")
    for attempt, node in ((1, "a new one"), (2, "the same one"), (3, "a replaced one, or a spare")):
        if attempt != 2:
            shutil.rmtree(nodes.folder_of(1), ignore_errors=True)
            copy, _ = nodes.start(1)
        nodes.folder_of(0).joinpath("last.pt").write_bytes(b"attempt %d" % attempt)
        source.fill(attempt, go_on)
        copy.fill(attempt, go_on)
        assert nodes.content(1) == nodes.content(0), node


def test_the_last_copy_has_what_a_script_without_saved_wrote_last(nodes):
    source, _ = nodes.start(0)
    copy, journal = nodes.start(1)
    source.fill(1, go_on)
    copy.fill(1, go_on)
    nodes.folder_of(0).joinpath("last.pt").write_bytes(b"the last step")
    for side in (source, copy):
        side.finish(succeeded=True)
    assert nodes.content(1) == nodes.content(0) != {}
    assert journal.lines == []


def test_a_node_without_a_copy_starts_its_ranks_after_a_limited_time(nodes, monkeypatch):
    monkeypatch.setattr(checkpoint_copies, "FILL_S", 0.2)
    copy, journal = nodes.start(1)
    copy.fill(1, go_on)  # node 0 announces nothing
    assert len(journal.lines) == 1
    copy.fill(1, lambda: True)  # as after a stop
    assert len(journal.lines) == 1
    third, journal = nodes.start(2)
    third.fill(1, go_on)  # it keeps no copy
    assert journal.lines == []


def new_node_0(nodes, tmp_path, steps):
    """Return a new node 0 whose folder is empty. Each of the other nodes offers its copy of the given step."""
    for node, step in steps.items():
        nodes.members = (0, node)
        nodes.start(0)
        nodes.start(node)
        nodes.save(step)
        until(lambda node=node, step=step: nodes.has(node, step))
    after = Nodes(tmp_path)
    after.members, after.folder_of = (0, *steps), lambda node: tmp_path / (f"box{node}" if node else "spare")
    for node in steps:
        after.start(node, offers_at="127.0.0.1")
    return after, *after.start(0, is_new=True)


def test_a_new_node_0_fetches_another_copy_if_the_newest_is_lost(nodes, tmp_path):
    after, new, journal = new_node_0(nodes, tmp_path, {1: 3, 2: 5})
    (after.folder_of(2) / "step-5.pt").unlink()
    new.restore()
    assert read_manifest(after.folder_of(0) / COPY).step == 3
    assert [facts["step"] for facts in journal.of("checkpoint_copied")] == [3]
    assert len(journal.lines) == 3, "two attempts and one failure"


def test_a_new_node_0_ends_if_no_copy_can_be_fetched(nodes, tmp_path):
    after, new, _ = new_node_0(nodes, tmp_path, {1: 3})
    (after.folder_of(1) / "step-3.pt").unlink()
    with refused(NodeError, code=Exit.UNAVAILABLE):
        new.restore()


@pytest.mark.parametrize(
    ("own", "expected"),
    [({"run": "before"}, 3), ({}, 3), ({"run": "night", "files": []}, 3), ({"run": "night"}, 9)],
)
def test_a_new_node_0_keeps_only_a_newer_checkpoint_of_this_run(nodes, tmp_path, own, expected):
    after, new, journal = new_node_0(nodes, tmp_path, {1: 3})
    (after.folder_of(0) / "step-9.pt").write_text("x")
    manifest = {"step": 9, "files": [["step-9.pt", 1, 1, hashlib.sha256(b"x").hexdigest()]]} | own
    (after.folder_of(0) / COPY).write_text(json.dumps(manifest))
    new.restore()
    assert read_manifest(after.folder_of(0) / COPY).step == expected
    assert journal.lines


def test_copies_need_a_secret(nodes):
    with refused(NodeError, "DDP_SECRET_FILE", code=Exit.CONFIG):
        nodes.start(0, secret=b"")
    assert nodes.start(0, secret=b"", copies=1)[0] is None


def announced(nodes):
    until(lambda: nodes.store.check([ANNOUNCED]))
    value = nodes.store.get(ANNOUNCED)
    return json.loads(value.partition(b" ")[2])


def get(port, path, proof=""):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={PROOF: proof} if proof else {})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_without_the_secret_nothing_is_read(nodes):
    nodes.folder_of(0).mkdir()
    nodes.save(1)
    source, _ = nodes.start(0)
    place = announced(nodes)
    name = place["sha256"]
    good = source.proof(place["nonce"], name)
    assert get(place["port"], f"/{name}", good)[0] == 200
    held = (nodes.folder_of(0) / "step-1.pt").read_bytes()
    other = next(file for file in read_manifest(nodes.folder_of(0) / COPY).files if file.path == "step-1.pt")
    forged, _ = nodes.start(1, secret=b"x" * 16)
    for path, proof in (
        (f"/{name}", ""),
        (f"/{name}", "0" * 64),
        (f"/{name}", forged.proof(place["nonce"], name)),
        (f"/{other.sha256}", good),  # a proof is for one content
        (f"/{name}", source.proof("another nonce", name)),
        ("/step-1.pt", source.proof(place["nonce"], "step-1.pt")),
        ("/../node-0/events.jsonl", source.proof(place["nonce"], "../node-0/events.jsonl")),
    ):
        status, body = get(place["port"], path, proof)
        assert status == 404
        assert held not in body
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=30) as connection:
        connection.sendall(b"\0" * 100 + b"\n\n")
        assert held not in connection.recv(1 << 16)


def test_a_copy_whose_manifest_is_there_is_completed(nodes):
    """A kill came between the manifest's new name and the files' new names."""
    nodes.start(0)
    nodes.start(1)
    nodes.save(1)
    until(lambda: nodes.has(1, 1))
    folder = nodes.folder_of(1)
    for name in ("latest", "step-1.pt"):
        (folder / name).rename(folder / f".{name}.part")
    finish_copy(folder)
    assert nodes.content(1) == nodes.content(0)


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
