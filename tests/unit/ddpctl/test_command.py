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
