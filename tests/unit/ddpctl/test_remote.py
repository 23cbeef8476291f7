"""Commands on other machines: sessions that an sshd refuses, and hosts that are lost. Real servers: tests/cluster."""

from collections.abc import Callable
from typing import Any

import pytest
from paramiko.ssh_exception import SSHException

from ddpctl.command import UNREACHED, Command, Host, Output
from ddpctl.execution.remote import Remote


class Session:
    """A session that prints a line, then calls ``then``, and ends with its connection, or with a code."""

    eof_received = closed = True

    def __init__(self, code: int, then: Callable[[], None]) -> None:
        self.exit_status, self.data, self.then = code, [b"step 1\n"], then

    def __getattr__(self, _: str) -> Callable[..., bool]:
        return lambda *_: False

    def recv_ready(self) -> bool:
        return bool(self.data)

    def recv(self, _: int) -> bytes:
        return self.data.pop()

    def exit_status_ready(self) -> bool:
        self.then()
        return True


class Box:
    """A connection to a host. The first one is broken; its sshd refuses two sessions."""

    is_connected = True

    def __init__(self, code: int, then: Callable[[], None]) -> None:
        self.code, self.then, self.answers = code, then, [EOFError(), SSHException(), SSHException()]
        self.opened = self.closed = 0
        self.transport = self

    def open(self, _: Host) -> "Box":
        self.opened += 1
        return self

    def is_active(self) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1

    def open_session(self, timeout: float) -> Session:  # noqa: ARG002
        if self.answers:
            raise self.answers.pop(0)
        return Session(self.code, self.then)


@pytest.mark.parametrize(
    ("code", "is_closed", "expected"),
    [(0, False, 0), (3, False, 3), (-1, False, UNREACHED), (-1, True, UNREACHED)],
    ids=["ends", "fails", "host is lost", "ddpctl closes it"],
)
def test_a_lost_host_is_named_at_once_and_a_closed_connection_is_no_loss(
    code: int, is_closed: bool, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = Remote({"HOME": "/"})
    box: Any = Box(code, remote.close if is_closed else lambda: None)
    remote._connector = box
    remote.prepare(1)
    done: Output = remote.stream(Command(argv=("true",), host=Host(address="box1"), mode="stream"))
    printed = capsys.readouterr()
    assert (done.returncode, printed.out, box.opened) == (expected, "step 1\n", 2)
    assert printed.err.startswith("box1: ") == (expected == UNREACHED and not is_closed)
    assert (printed.err == "") == (expected != UNREACHED or is_closed)
