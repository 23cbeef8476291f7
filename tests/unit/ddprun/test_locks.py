"""File systems without flock (Lustre without -o flock): a node starts, says so, and a second one is still refused."""

import errno
import fcntl
import os
import threading
import time
from dataclasses import replace

import pytest

from ddprun.files import process_discovery
from ddpwire import locks
from ddpwire.locks import Lock, Owner
from ddpwire.run_files import LOCK


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)


def elsewhere(**changes: object) -> Owner:
    return replace(Owner.of_this_process(), host="other", machine="other", **changes)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EOPNOTSUPP])
def test_each_error_that_means_no_locks_is_recognized(number, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "a").open("w") as file:
        assert locks.lock(file.fileno(), tmp_path / "a") is Lock.UNSUPPORTED


def test_a_lock_is_busy_until_its_file_is_closed(tmp_path):
    with (tmp_path / "a").open("w") as first, (tmp_path / "a").open("w") as second:
        assert locks.lock(first.fileno(), tmp_path / "a") is Lock.TAKEN
        assert locks.lock(second.fileno(), tmp_path / "a") is Lock.BUSY
        assert locks.is_locked(tmp_path / "a")
    assert not locks.is_locked(tmp_path / "a")


@pytest.mark.usefixtures("without_flock")
def test_without_locks_the_owner_of_a_file_is_known_while_it_is_alive(tmp_path):
    lock = tmp_path / LOCK
    lock.touch()
    assert not process_discovery.is_locked(tmp_path)
    Owner.of_this_process().write(lock)
    assert process_discovery.is_locked(tmp_path)
    assert locks.owner_that_writes(lock) is not None
    replace(Owner.of_this_process(), started="1").write(lock)  # the pid belongs to another process now
    assert not process_discovery.is_locked(tmp_path)
    assert locks.owner_that_writes(lock) is None
    elsewhere().write(lock)
    assert process_discovery.is_locked(tmp_path)
    elsewhere(time=time.time() - 1000).write(lock)
    assert not process_discovery.is_locked(tmp_path)
    own = Owner.of_this_process()
    assert not own.keep(lock), "another process has taken the file"
    locks.disown(lock)
    assert own.keep(lock)
    locks.disown(lock)
    assert locks.read_owner(lock) is None


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
