"""The temporary folder of a rehearsal: that of another one that runs is kept, and one without an owner is removed."""

import json
import tempfile
from pathlib import Path

import pytest

from ddpwire.work_folder import PLAN, work_folder


def test_a_folder_is_removed_with_those_that_have_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with work_folder({"steps": 4}) as first:
        abandoned, starting = tmp_path / "ddpctl-rehearse-killed", tmp_path / "ddpctl-rehearse-starting"
        for path, text in ((abandoned, "{}"), (starting, "")):
            path.mkdir()
            (path / PLAN).write_text(text)
        with work_folder({}) as second:
            assert {*tmp_path.iterdir()} == {first, second, starting}
        assert json.loads((first / PLAN).read_text()) == {"work": str(first), "steps": 4}
    assert {*tmp_path.iterdir()} == {starting}
