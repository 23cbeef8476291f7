"""An object store of fsspec in this process's memory; tests/e2e/test_object_store.py has a real S3 server."""

from pathlib import Path
from uuid import uuid4

import pytest

from ddpwire.exits import Exit
from ddpwire.object_store import INDEX, ObjectStore, StoreError

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


@pytest.mark.parametrize("index", ["no JSON", '{"step": 1}', '[{"step": "x"}]', "[7]"])
def test_an_index_of_another_form_is_refused(url: str, index: str) -> None:
    with fsspec.open(f"{url}/{INDEX}", "w") as out:
        out.write(index)
    with pytest.raises(StoreError) as caught:
        ObjectStore(url).checkpoints()
    assert caught.value.code == Exit.UNAVAILABLE


def test_a_damaged_part_of_a_fetch_is_fetched_again(url: str, tmp_path: Path) -> None:
    (one,) = stored(url, tmp_path / "from").checkpoints()
    (tmp_path / f"{one['files'][0]['name']}.fetched").write_bytes(b"other")
    ObjectStore(url).fetch(one, tmp_path)
    assert (tmp_path / one["files"][0]["name"]).read_bytes() == b"weights"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


def damaged_store(url: str, folder: Path, steps: tuple[int, ...], damaged: tuple[int, ...]) -> ObjectStore:
    """A store with checkpoints of these steps, of which some have other bytes than the index says."""
    store = stored(url, folder, steps[0])
    store.write_index([one for step in steps for one in stored(url, folder, step).checkpoints()])
    for step in damaged:
        with fsspec.open(f"{url}/step-{step:08d}/step-{step}.pt", "wb") as out:
            out.write(b"weighty")
    return ObjectStore(url)


def test_a_newer_checkpoint_of_the_folder_is_kept(url: str, tmp_path: Path, empty: Path) -> None:
    damaged_store(url, tmp_path / "from", (7, 8), ()).fetch_newest(empty, 9, pytest.fail)
    assert not [*empty.iterdir()]
