"""An old checkpoint that cannot be deleted is no failure of the new one."""

from pathlib import Path

import pytest

from ddptrain.checkpoint_directory import CheckpointDirectory


def test_the_other_old_checkpoints_are_deleted_and_the_one_that_stays_is_named(tmp_path, monkeypatch):
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:08}.pt").write_bytes(b"x")
        (tmp_path / f"step-{step:08}.json").write_text("{}")
    unlink = Path.unlink

    def fail_for_the_second(path: Path, *args: object, **options: object) -> None:
        if path.name.startswith("step-00000002"):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, *args, **options)

    monkeypatch.setattr(Path, "unlink", fail_for_the_second)
    with pytest.raises(PermissionError) as raised:
        directory.delete_old(keep=1, keep_best=False, written=tmp_path / "step-00000004.pt")
    assert "step-00000002" in str(raised.value.filename)
    assert [path.name for path in sorted(tmp_path.glob("step-*.pt"))] == ["step-00000002.pt", "step-00000004.pt"]
