"""docs/results/features.md: each test that it names exists, and each command, flag and event has a row."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.core
from tests.in_process import verbs
from tests.unit.repository.test_specs import has_test

from ddprun.settings.options import OPTIONS
from ddptrain.config import GROUPS, flag_of
from ddpwire.events import KINDS

ROOT = Path(__file__).parents[3]
ROWS = [line for line in (ROOT / "docs/results/features.md").read_text().splitlines() if line.startswith("| ")]
CODE = {word for row in ROWS for name in re.findall(r"`([^`]+)`", row) for word in (name, *name.split())}


def commands(members: dict[str, Any], path: str) -> Iterator[str]:
    """Yield each command of ddpctl as a user types it."""
    for name, member in members.items():
        if isinstance(member, typer.core.TyperGroup):
            yield from commands({each: member.get_command(None, each) for each in member.commands}, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_each_command_and_event_has_a_row() -> None:
    assert {*commands(verbs(), "ddpctl")} - CODE == set()
    assert {*KINDS} - CODE == set()


def test_each_flag_has_a_row() -> None:
    launch = verbs()["launch"].params
    flags = {option for parameter in launch for option in parameter.opts if option.startswith("--")}
    flags |= {word for usage in OPTIONS for word in usage.split() if word.startswith("--")}
    flags |= {flag_of(item) for group in GROUPS.values() for item in fields(group)}
    assert flags - CODE - {"--help", "--version"} == set()


def test_each_row_names_tests_that_exist() -> None:
    rows = [row for row in ROWS if not row.startswith("| feature")]
    named = [(row, re.findall(r"`(tests/[\w./-]*\.py)(?:::(\w+))?`", row.rpartition(" | ")[2])) for row in rows]
    assert [row for row, tests in named if not tests] == []
    assert [test for _, tests in named for test in tests if not has_test(ROOT / test[0], test[1])] == []
