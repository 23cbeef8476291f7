"""An object store of fsspec in this process's memory; tests/e2e/test_object_store.py has a real S3 server."""

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.messages import refused

from ddprank import object_store
from ddprank.object_store import INDEX, ObjectStore, StoreError, Uploader
from ddpwire.events import EventLog, read_events
from ddpwire.exits import Exit

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4()}"


def stored(url: str, folder: Path, step: int = 7) -> ObjectStore:
    """A store with one checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (path := folder / f"step-{step}.pt").write_bytes(b"weights")
    store = ObjectStore(url)
    store.write_index([{"step": step, "accuracy": None, "files": [store.put(step, path)]}])
    return store


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "../../victim"), ("name", "/tmp/victim"), ("name", "a/b"), ("name", ".hidden"), ("name", 7),
     ("bytes", -1), ("bytes", "7"), ("modified", None)],
)  # fmt: skip
def test_an_index_that_leads_out_of_the_folder_is_refused(url: str, tmp_path: Path, key: str, value: Any) -> None:
    (checkpoint,) = stored(url, tmp_path / "from").checkpoints()
    checkpoint["files"][0][key] = value
    ObjectStore(url).write_index([checkpoint])
    with refused(StoreError, INDEX, code=Exit.UNAVAILABLE):
        ObjectStore(url).checkpoints()


def test_a_damaged_object_is_not_taken(url: str, tmp_path: Path) -> None:
    (checkpoint,) = stored(url, tmp_path / "from").checkpoints()
    with fsspec.open(f"{url}/step-00000007/step-7.pt", "wb") as out:
        out.write(b"weighty")
    with refused(StoreError, code=Exit.DATA):
        ObjectStore(url).fetch(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


def damaged_store(url: str, folder: Path, steps: tuple[int, ...], damaged: tuple[int, ...]) -> ObjectStore:
    """A store with checkpoints of these steps, of which some have other bytes than the index says."""
    store = stored(url, folder, steps[0])
    store.write_index([checkpoint for step in steps for checkpoint in stored(url, folder, step).checkpoints()])
    for step in damaged:
        with fsspec.open(f"{url}/step-{step:08d}/step-{step}.pt", "wb") as out:
            out.write(b"weighty")
    return ObjectStore(url)


def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one(url: str, tmp_path: Path, empty: Path) -> None:
    warnings: list[str] = []
    damaged_store(url, tmp_path / "from", (7, 8, 9), (9,)).fetch_newest(empty, None, warnings.append)
    assert [path.name for path in empty.iterdir()] == ["step-8.pt"]
    assert len(warnings) == 1
    assert [checkpoint["step"] for checkpoint in ObjectStore(url).checkpoints()] == [8, 7], "it is uploaded again"


def test_only_damaged_checkpoints_are_an_error_unless_the_folder_has_one(url: str, tmp_path: Path, empty: Path) -> None:
    store = damaged_store(url, tmp_path / "from", (7, 8), (7, 8))
    with refused(StoreError, code=Exit.DATA):
        store.fetch_newest(empty, None, pytest.fail)
    assert [checkpoint["step"] for checkpoint in ObjectStore(url).checkpoints()] == [8, 7], "nothing is changed"
    warnings: list[str] = []
    store.fetch_newest(empty, 7, warnings.append)
    assert len(warnings) == 2


def test_a_failed_upload_and_the_one_that_follows_are_events(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "step-7.pt").write_bytes(b"weights")
    store, put, failures = ObjectStore(url), ObjectStore.put, [StoreError(Exit.UNAVAILABLE, "it is away")]

    def fail_once(self: ObjectStore, step: int, path: Path) -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return put(self, step, path)

    monkeypatch.setattr(ObjectStore, "put", fail_once)
    events, warnings = EventLog(tmp_path / "events.jsonl", node=0), list[str]()
    uploader = Uploader(store, keep=1, keep_best=False, events=events, warn=warnings.append)
    uploader.offer(7, [path], None)
    assert uploader.wait(lambda: False) == Exit.OK
    failed, uploaded = read_events((tmp_path / "events.jsonl").read_text())
    assert (failed.event, failed.step, failed.facts["message"]) == ("upload_failed", 7, "it is away")
    assert (uploaded.event, uploaded.step, uploaded.facts) == ("checkpoint_uploaded", 7, {"bytes": 7, "url": url})
    assert [entry["step"] for entry in store.checkpoints()] == [7]
    assert len(warnings) == 1
    uploader.offer(8, [path], None)
    assert (uploader.wait(lambda: False), [entry["step"] for entry in store.checkpoints()]) == (Exit.OK, [8])
    assert not store._fs.exists(f"{store._root}/step-00000007/step-7.pt")


def test_an_object_that_arrives_damaged_is_no_upload_and_a_stop_does_not_wait_for_a_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "step-7.pt").write_bytes(b"weights")
    store, warnings = ObjectStore(url), list[str]()
    monkeypatch.setattr(store, "_chunks", lambda *_: [b"weighty"])
    with refused(StoreError, "step-7.pt", code=Exit.DATA):
        store.put(7, path)
    monkeypatch.setattr(object_store, "STOP_WAIT_S", 0.0)
    monkeypatch.setattr(object_store, "STALL_S", 20.0)
    uploader = Uploader(store, keep=1, keep_best=False, events=EventLog(None, node=0), warn=warnings.append)
    uploader.offer(7, [path], None)
    asked_at = time.monotonic()
    assert uploader.wait(lambda: True) == Exit.CANNOT_WRITE
    assert time.monotonic() - asked_at < 20
