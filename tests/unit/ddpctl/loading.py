"""A ddpctl.yaml in the current folder, loaded for targets that exist here only, and what its errors must name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from annotated_types import Ge

from ddpctl import config
from ddpctl.spec import Doc


@dataclass(frozen=True, kw_only=True)
class Local:
    pass


@dataclass(frozen=True, kw_only=True)
class Ssh:
    hosts: Annotated[tuple[str, ...], Doc("Where.")]
    user: Annotated[str | None, Doc("Who; null: you.")] = None
    check: Annotated[bool, Doc("Whether to look first.")] = True
    tries: Annotated[int, Doc("How often."), Ge(1)] = 1


KINDS = {"local": lambda: Local, "ssh": lambda: Ssh}


def load(
    text: str | bytes | None = None, *, profile: str | None = None, target: str | None = None, **flags: Any
) -> config.Settings:
    file = None
    if text is not None:
        file = Path("ddpctl.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load(file=file, profile=profile, target=target, overrides=flags, kinds=KINDS)


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
