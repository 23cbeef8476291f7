"""What is shown of a transfer, and where its bytes go; what a host may name in a pull."""

import io
import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest

from ddpctl.command import Command, FilePart, Host, Output, Transfer
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.execution.transfers import Display, move, pump
from ddpctl.files.project_files import look
from ddpctl.targets.ssh.project import _project


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("room", [0, 2])
def test_a_write_that_fails_names_its_file(tmp_path: Path, room: int) -> None:
    """With room for a part of it, the first write is short, and only the next one fails."""
    transfer = Transfer(num_bytes=3, num_files=1, writes=(FilePart(path=str(tmp_path / "a"), start=0, length=3),))
    read, write = os.pipe()
    os.write(write, b"abc")
    os.close(write)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with os.fdopen(read, "rb") as pipe, pytest.raises(OSError, match="File too large") as error:
            pump(transfer, pipe.fileno(), pipe.fileno(), 5.0, lambda *_: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(tmp_path / "a")


def test_a_file_to_send_that_is_missing_is_not_taken_for_a_missing_program(tmp_path: Path) -> None:
    transfer = Transfer(num_bytes=3, num_files=1, reads=FilePart(path=str(tmp_path / "a"), start=0, length=3))
    command = Command(argv=("cat",), transfer=transfer)
    with pytest.raises(NoInputError) as error:
        move(command, transfer, lambda **_: nullcontext(), Display([transfer], io.StringIO()), 0)
    assert str(tmp_path / "a") in str(error.value)


def test_the_progress_of_rsync_is_read_and_a_stall_ends_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    text = b"\r     32,768   1%    0.00kB/s    0:00:00  \r  1,234,567  40%  2.3MB/s    0:00:01 (xfr#5, to-chk=3/9)\r"
    os.write(write, text)
    seen: list[tuple[int, int]] = []
    transfer = Transfer(num_bytes=3_000_000, num_files=9, rsync_to=Host(address="box1"))
    with (tmp_path / "in").open("w+b") as stdin, pytest.raises(TimeoutError):
        pump(transfer, stdin.fileno(), read, 0.1, lambda *n: seen.append(n))
    os.close(read)
    os.close(write)
    assert seen[-1] == (1_234_567, 5)


def test_a_large_project_is_refused_and_the_largest_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/x").open("wb") as file:
        file.truncate(200_000_001)
    (tmp_path / "a.py").write_text("")
    (tmp_path / "dropped").write_text("")
    files = look(
        "rsync  version 3.2.7\0/usr/bin/zstd\0/\0a.py\0data/x\0gone\0data\0dropped\0data/\0/\0dropped\0/\0.venv/\0/\0"
    )
    assert files["left_out"] == [
        ".venv/ (ignored)",
        "dropped (.ddpignore)",
        "data (no file)",
        "data/ (a repository of its own)",
    ]
    assert (sorted(files["files"]), files["rsync"], files["zstd"]) == (["a.py", "data/x"], True, True)
    with pytest.raises(ConfigError) as error:
        _project("/project", Output(returncode=0, stdout=json.dumps(files)))
    assert (error.value.code, error.value.fields) == (78, {"num_bytes": 200_000_001})
    assert "(largest: data/ 200.0 MB, a.py 0 B)" in error.value.message


def test_a_terminal_has_a_bar_in_80_columns_and_a_file_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    transfers = [Transfer(num_bytes=100_000_000, num_files=2000)] * 4
    display = Display(transfers, Terminal())
    display.update(0, 50_000_000, 800)
    display.end(1, whole=True)
    line = display.line(2.0, 79)
    assert len(line) <= 79
    assert line == "  [###----] 150.0/400.0 MB, 2,800/8,000 files, 1/4 hosts, 75.0 MB/s, 3.3 s left"
    assert display.line(2.0, 40) == "  150.0/400.0 MB, 2,800/8,000 files,..."
    assert display.line(2.0, 0) == "   38%  150.0/400.0 MB, 2,800/8,000 files, 1/4 hosts, 75.0 MB/s, 3.3 s left"
    out, plain = Terminal(), io.StringIO()
    for stream in (out, plain):
        single = Display(transfers[:1], stream)
        single.end(0, whole=True)
        single.close()
    assert (out.getvalue().startswith("\r\x1b[K"), out.getvalue().endswith("\n")) == (True, True)
    assert "100.0/100.0 MB, 2,000/2,000 files" in out.getvalue()
    assert plain.getvalue() == ""  # it was over before a line was due


def test_a_stream_is_cut_into_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"0123456789")
    parts = (
        FilePart(path=str(tmp_path / "new/a"), start=0, length=3),
        FilePart(path=str(tmp_path / "empty"), start=0, length=0),
        FilePart(path=str(tmp_path / "b"), start=4, length=5),
    )
    read, write = os.pipe()
    os.write(write, b"abcDEFGHlost")
    os.close(write)
    progress: list[tuple[int, int]] = []
    with os.fdopen(read, "rb") as pipe, (tmp_path / "b").open("rb") as stdin:
        pump(
            Transfer(num_bytes=8, num_files=3, writes=parts),
            stdin.fileno(),
            pipe.fileno(),
            5.0,
            lambda *n: progress.append(n),
        )
    assert [(tmp_path / name).read_bytes() for name in ("new/a", "empty", "b")] == [b"abc", b"", b"0123DEFGH"]
    assert progress[-1] == (8, 3)
