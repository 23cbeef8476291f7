"""An object store of fsspec in this process's memory; tests/e2e/test_object_store.py has a real S3 server."""

from pathlib import Path

import pytest
from tests.unit.ddprank import test_object_store
from tests.unit.ddprank.test_object_store import damaged_store, stored

from ddprank.object_store import INDEX, ObjectStore, StoreError
from ddpwire.exits import Exit

url = test_object_store.url  # the fixture

empty = test_object_store.empty  # the fixture

fsspec = pytest.importorskip("fsspec")


@pytest.mark.parametrize("index", ["no JSON", '{"step": 1}', '[{"step": "x"}]', "[7]"])
def test_an_index_of_another_form_is_refused(url: str, index: str) -> None:
    with fsspec.open(f"{url}/{INDEX}", "w") as out:
        out.write(index)
    with pytest.raises(StoreError) as caught:
        ObjectStore(url).checkpoints()
    assert caught.value.code == Exit.UNAVAILABLE


def test_a_damaged_part_of_a_fetch_is_fetched_again(url: str, tmp_path: Path) -> None:
    (checkpoint,) = stored(url, tmp_path / "from").checkpoints()
    (tmp_path / f"{checkpoint['files'][0]['name']}.fetched").write_bytes(b"other")
    ObjectStore(url).fetch(checkpoint, tmp_path)
    assert (tmp_path / checkpoint["files"][0]["name"]).read_bytes() == b"weights"


def test_a_newer_checkpoint_of_the_folder_is_kept(url: str, tmp_path: Path, empty: Path) -> None:
    damaged_store(url, tmp_path / "from", (7, 8), ()).fetch_newest(empty, 9, pytest.fail)
    assert not [*empty.iterdir()]
