"""A script whose folder and checkpoint are deleted while they are recorded."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.ddprank import test_resume
from tests.unit.ddprank.test_resume import Audited, Lion, adam

from ddprank.resume import ResumeRecord

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


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError])
def test_an_exception_of_a_signal_handler_reaches_the_script(
    error: type[Exception], audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may run between any two calls in the hook or in the record, here in getcwd and in stat."""

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR2)

    def handler(*_: Any) -> None:
        raise error

    wakeup = signal.set_wakeup_fd(-1)  # else the thread of another test's ddprank.signals may end this process
    old = signal.signal(signal.SIGUSR2, handler)
    monkeypatch.chdir(tmp_path / "checkpoints")
    try:
        (tmp_path / "checkpoints/last.pt").read_bytes()
        for name, call in (("getcwd", Path("last.pt").read_bytes), ("stat", lambda: audited[0].begin(5))):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, interrupted)
                with pytest.raises(error):
                    call()
    finally:
        signal.signal(signal.SIGUSR2, old)
        signal.set_wakeup_fd(wakeup)


def test_a_relative_path_and_a_link_to_the_folder_lead_to_the_same_file(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("checkpoints")
    (tmp_path / "heartbeat.resume").unlink(missing_ok=True)
    other = ResumeRecord(str(tmp_path / "link"), str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path)
    Path("checkpoints/../checkpoints/last.pt").read_bytes()
    for record in (audited[0], other):
        record.begin(0)
    assert audited[1]()["files"] == json.loads((tmp_path / "other").read_text())["files"] != {}


@pytest.mark.parametrize(
    ("kind", "options", "states", "counted", "is_fresh"),
    [
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}, [adam(torch.tensor(261.0))], 261, False),
        (torch.optim.SGD, {"momentum": 0.9}, [{"momentum_buffer": torch.ones(1)}], None, False),
        (Lion, {"lr": torch.ones(2, device="meta")}, [torch.ones(2)], None, False),  # like a GPU's: it is not read
        (Lion, {}, [{"step": torch.ones((), device="meta")}], None, False),
    ],
)
def test_the_optimizer_tells_the_step_at_which_the_rank_begins(kind, options, states, counted, is_fresh, audited):
    test_resume.test_the_optimizer_tells_the_step_at_which_the_rank_begins(
        kind, options, states, counted, is_fresh, audited
    )
