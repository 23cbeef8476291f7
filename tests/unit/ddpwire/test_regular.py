"""Only what is a file is opened; what would keep a reader waiting is refused."""

import os
from pathlib import Path

import pytest

from ddpwire.run_files import read_regular


def test_a_file_is_read_and_a_fifo_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    assert read_regular(tmp_path / "file") == b"a\n"
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/zero"), tmp_path, tmp_path / "gone"):
        with pytest.raises(OSError, match=r"regular|directory|No such"):
            read_regular(path)
