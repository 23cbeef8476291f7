"""Who has which GPUs of a host, and who waits: a host's scripts in its shell, with real processes and locks."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import wait_until
from tests.unit.ddpctl.test_ssh_claims import FOLDER, OPTIONS, Host

from ddpctl.targets.ssh import claims
from ddpctl.targets.ssh.target import SshTarget


def _close(session: subprocess.Popen[str]) -> None:
    assert session.stdin
    session.stdin.close()  # as when ddpctl, or its connection, is gone


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for session in made.sessions:
        with session:
            session.kill()
    for path in tmp_path.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_rm_removes_the_claims_of_ended_runs_only(host: Host) -> None:
    assert host.start("night", "GPU-0").returncode == 0
    assert host.start("day", "GPU-1").returncode == 0
    os.kill(host.pid("night"), signal.SIGKILL)
    wait_until(lambda: host.facts().free_gpus == ("GPU-0",), "the free GPU")
    target = SshTarget(OPTIONS)
    assert host.run(target.remove_outside()).returncode == 0
    assert [path.name for path in host.home.glob(".ddpctl/claims-*/run-*")] == ["run-day.0"]


def test_a_ticket_that_is_not_renewed_is_given_up(host: Host) -> None:
    """The machine of the ddpctl that holds it was switched off, and nobody closed the connection."""
    first, second = host.wait("a"), host.wait("b")
    (path,) = host.home.glob(".ddpctl/claims-*/ticket-000000001")
    os.utime(path, (1.0, 1.0))
    assert first.wait(60) == 0
    assert host.line() == ["b"]
    assert second.poll() is None
    (path,) = host.home.glob(".ddpctl/claims-*/ticket-000000002")
    before = path.stat().st_mtime_ns
    assert host.run(claims.renew(FOLDER, 2)).returncode == 0
    assert path.stat().st_mtime_ns > before


@pytest.mark.parametrize("end", [_close, subprocess.Popen.kill], ids=["connection", "kill"])
def test_tickets_are_in_the_order_of_arrival_and_who_dies_loses_his(
    host: Host, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    first, *_ = [host.wait(run) for run in ("b", "a", "c")]
    assert host.line() == ["b", "a", "c"]
    end(first)
    wait_until(lambda: host.line() == ["a", "c"], "the line without b")
    host.wait("b")
    assert host.line() == ["a", "c", "b"]
