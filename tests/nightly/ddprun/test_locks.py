"""Errors of a lock besides the absence of locks."""

import errno
import fcntl

import pytest

from ddpwire import locks


def test_another_error_of_a_lock_names_its_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "a").open("w") as file, pytest.raises(OSError, match="a") as raised:
        locks.lock(file.fileno(), tmp_path / "a")
    assert raised.value.filename == str(tmp_path / "a")
