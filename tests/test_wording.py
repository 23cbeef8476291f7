"""The golden files of messages: each entry is of a test that hands its sentences to ``wording``."""

import ast
from pathlib import Path

import pytest
from tests.wording import FOLDER, program_of, read

TESTS = Path(__file__).parent


@pytest.mark.parametrize("program", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_each_entry_is_of_a_test_that_uses_it(program: str) -> None:
    users = {
        f"{path.stem}::{function.name}"
        for path in TESTS.rglob("test_*.py")
        if program_of(path) == program
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and function.name.startswith("test_")
        and "wording" in [argument.arg for argument in function.args.args]
    }
    entries = {test.partition("[")[0] for test in read(program)}
    assert entries == users
