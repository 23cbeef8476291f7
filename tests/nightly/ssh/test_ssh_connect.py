"""Keys and second factors that a real sshd refuses; tests/cluster has the others."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.ssh_lab import MISSING, fingerprint, make_key
from tests.cluster.test_ssh_connect import Lab
from tests.cluster.test_ssh_connect import lab as lab

from ddpctl.command import Command, Host, Output
from ddpctl.execution.remote import PROBE_S

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")


def test_revoked_host_key_is_refused_and_one_among_several_is_accepted(lab: Lab, tmp_path: Path) -> None:
    trusted, distrusted = lab.boxes
    other = make_key(tmp_path / "rsa", "rsa")
    lab.person.known_hosts.write_text("")
    lab.person.trusts(trusted.known_name, other)  # another kind of key comes first
    lab.person.trusts(trusted.known_name, trusted.host_key)
    revoked = " ".join(distrusted.host_key.split()[:2])
    with lab.person.known_hosts.open("a") as file:
        file.write(f"{distrusted.known_name} {revoked}\n@revoked * {revoked}\n")
    lab.configure("")
    ask = [Command(argv=("true",), host=lab.host(number)) for number in (0, 1)]
    accepted, refused = lab.run(*ask)
    assert accepted == Output(returncode=0)
    assert (refused.returncode, fingerprint(distrusted.host_key) in refused.stderr) == (255, True)
    assert "revoked" in refused.stderr


def test_a_second_factor_is_named_and_nobody_is_asked(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    here = lab.boxes[0]
    config = (here.folder / "sshd_config").read_text()
    changed = config.replace("PasswordAuthentication no", "PasswordAuthentication yes")
    (here.folder / "sshd_config").write_text(f"{changed}AuthenticationMethods publickey,password\n")
    here.start()
    (refused,) = lab.run(Command(argv=("true",), host=lab.host()))
    assert refused.returncode == 255
    assert ["accepts the key" in refused.stderr, "AuthenticationMethods" in refused.stderr] == [True, True]
    assert capfd.readouterr() == ("", "")  # paramiko would ask on stdout, and read stdin


def test_a_key_that_cannot_be_read_and_a_known_hosts_that_keeps_nothing_are_named(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n")
    host = replace(lab.host(), key=str(tmp_path / "key"))
    (unread,) = lab.run(Command(argv=("true",), host=host))
    assert (unread.returncode, str(tmp_path / "key") in unread.stderr) == (255, True)
    assert "ssh-keygen -p -f" in unread.stderr
    lab.configure("Host *\n  UserKnownHostsFile /dev/null\n")
    (untrusted,) = lab.run(Command(argv=("true",), host=lab.host()))
    assert (untrusted.returncode, fingerprint(lab.boxes[0].host_key) in untrusted.stderr) == (255, True)
    assert "UserKnownHostsFile" in untrusted.stderr


def test_commands_wait_for_a_session_of_an_sshd_that_allows_one_at_a_time(lab: Lab) -> None:
    """A command that is silent for so long that its host is checked is not lost, although the check gets no session."""
    here = lab.boxes[0]
    with (here.folder / "sshd_config").open("a") as config:
        config.write("MaxSessions 1\n")
    here.start()
    scripts = [f"sleep {PROBE_S + 0.5 if n == 0 else 0}; echo {n}" for n in range(6)]
    outputs = lab.run(*(Command(argv=("/bin/sh",), stdin=text, host=lab.host()) for text in scripts))
    assert outputs == tuple(Output(returncode=0, stdout=f"{n}\n") for n in range(6))


def test_server_that_is_slow_to_agree_on_keys_is_not_taken_for_another_program(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpctl.execution.ssh.CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address, port = server.getsockname()
        commands = pool.submit(lab.run, Command(argv=("true",), host=Host(address=address, port=port)))
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            (slow,) = commands.result()
    assert (slow.returncode, " 1 s" in slow.stderr) == (255, True), slow.stderr
