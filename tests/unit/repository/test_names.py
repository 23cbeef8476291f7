"""A variable, a parameter and a field have the name of what they hold, such as ``reason`` instead of ``why``."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
VAGUE = {"found", "one", "what", "why", "words", "asked", "said", "told", "left", "there", "stuff"}
ALLOWED = {
    ("trainer/ddpwire/run_files.py", "why"),  # a key of a node's state file
    ("cli/ddpctl/report/charts.py", "left"),  # the edge of a chart, beside its top and its right
    ("bench/fault_injection/result.py", "found"),  # a key of the JSON of bench/faults.py
    ("bench/trial.py", "said"),  # a key of the JSON of bench/misconfigured.py
    ("bench/frozen_disk.py", "left"),  # a key of this benchmark's JSON
}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each variable and attribute that is assigned, and of each parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def test_names_say_what_they_hold() -> None:
    vague = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("cli", "trainer", "bench", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in VAGUE.intersection(bound_names(ast.parse(path.read_text())))
    }
    assert vague == ALLOWED
