"""Commands as the lines of a shell."""

import pytest

from ddpctl.command import Command, Host, shell_line

BOX = Host(address="box1", user="alice", port=2222, key="/keys/box")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (Command(argv=("echo", "a b")), "echo 'a b'"),
        (Command(argv=("true",), host=Host(address="box1")), "ssh -- box1 true"),
        (
            Command(argv=("echo", "a b"), env={"A": "1 2"}, cwd="/x y", host=BOX),
            "ssh -l alice -p 2222 -i /keys/box -- box1 "
            """'cd '"'"'/x y'"'"' && A='"'"'1 2'"'"' echo '"'"'a b'"'"''""",
        ),
        (Command(argv=("top",), host=BOX, mode="tty"), "ssh -l alice -p 2222 -i /keys/box -t -- box1 top"),
        (
            Command(argv=("/bin/sh",), stdin="date\n", host=Host(address="box1")),
            "ssh -- box1 /bin/sh <<'END_OF_INPUT'\ndate\nEND_OF_INPUT",
        ),
        (
            Command(argv=("/bin/sh",), stdin="x=secret\n", secret=True, host=Host(address="box1")),
            "ssh -- box1 /bin/sh <<'END_OF_INPUT'\n[REDACTED]\nEND_OF_INPUT",
        ),
    ],
)
def test_a_command_is_a_line_that_a_person_can_type(command: Command, line: str) -> None:
    assert shell_line(command) == line


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("box1", Host(address="box1")),
        ("alice@box1:2222", Host(address="box1", user="alice", port=2222)),
        ("me@10.0.0.7", Host(address="10.0.0.7", user="me")),
        ("[fe80::1]:22", Host(address="fe80::1", port=22)),
    ],
)
def test_a_host_has_an_optional_user_and_port(text: str, host: Host) -> None:
    assert Host.from_text(text) == host


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "box1:0", "box1:65536", "a b", "me@", "@box1"])
def test_a_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="USER@"):
        Host.from_text(text)
