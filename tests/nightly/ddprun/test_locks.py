"""Errors of a lock besides the absence of locks."""

import errno
import fcntl
import os
import threading

import pytest
from tests.unit.ddprun import test_runtime_folder
from tests.unit.ddprun.test_runtime_folder import elsewhere

from ddpwire import locks
from ddpwire.locks import Lock
from ddpwire.run_files import LOCK

without_flock = test_runtime_folder.without_flock  # the fixture


def test_another_error_of_a_lock_names_its_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "a").open("w") as file, pytest.raises(OSError, match="a") as raised:
        locks.lock(file.fileno(), tmp_path / "a")
    assert raised.value.filename == str(tmp_path / "a")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EOPNOTSUPP])
def test_each_error_that_means_no_locks_is_recognized(number, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "a").open("w") as file:
        assert locks.lock(file.fileno(), tmp_path / "a") is Lock.UNSUPPORTED


@pytest.mark.usefixtures("without_flock")
def test_an_owner_on_another_machine_is_alive_if_it_writes(tmp_path):
    lock = tmp_path / LOCK
    elsewhere(time=1.0).write(lock)
    assert locks.owner_that_writes(lock, timeout_s=0.1) is None, "of it nothing is known"
    writer = threading.Timer(0.1, elsewhere(time=2.0).write, (lock,))
    writer.start()
    owner = locks.owner_that_writes(lock, timeout_s=60)
    writer.join()
    assert owner is not None
    assert owner.host == "other"
