"""A script whose folder and checkpoint are deleted while they are recorded."""

from pathlib import Path

import pytest
from tests.unit.ddprank import test_resume
from tests.unit.ddprank.test_resume import Audited

audited = test_resume.audited  # the fixture


def test_a_deleted_current_folder_and_a_deleted_file_do_not_disturb_the_script(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match=r"last\.pt"):
        Path("last.pt").read_bytes()
    (tmp_path / "checkpoints/last.pt").read_bytes()
    (tmp_path / "checkpoints/last.pt").unlink()
    audited[0].begin(0)
    assert audited[1]()["files"] == {}
