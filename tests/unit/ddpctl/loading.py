"""A ddpctl.yaml in the current folder, loaded for targets that exist here only, and what its errors must name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from ddpctl.job import config
from ddpctl.job.launch_plan import Request
from ddpctl.job.values import Options, Words, between


@dataclass(frozen=True, kw_only=True)
class Local(Options):
    pass


@dataclass(frozen=True, kw_only=True)
class Ssh(Options):
    hosts: Words
    """Where."""
    user: str | None = None
    """Who; null: you."""
    check: bool = True
    """Whether to look first."""
    tries: Annotated[int, between(1)] = 1
    """How
    often."""


KINDS = {"local": lambda: Local, "ssh": lambda: Ssh}


def load(
    text: str | bytes | None = None, *, profile: str | None = None, target: str | None = None, **flags: Any
) -> Request:
    file = None
    if text is not None:
        file = Path("ddpctl.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load(file=file, profile=profile, target=target, flags=flags, kinds=KINDS)


def read_cases(path: Path) -> list[Any]:
    """Files and their errors, from a file of tests/data: the text, "----", a line for each error, "===="."""
    cases = (case.split("----\n") for case in path.read_text().split("====\n"))
    return [pytest.param(text, errors.splitlines(), id=errors.splitlines()[0]) for text, errors in cases]


def check_errors(message: str, expected: list[str]) -> None:
    """Check a message: a line for each error, at ``LINE:COLUMN | fact | fact``, which names these facts."""
    lines = message.split("\n")
    places = [row.split(" | ")[0] for row in expected]
    assert [line.partition(": ")[0] for line in lines] == [f"ddpctl.yaml:{place}" for place in places]
    for line, row in zip(lines, expected, strict=True):
        assert [fact for fact in row.split(" | ")[1:] if fact not in line.partition(": ")[2]] == []
