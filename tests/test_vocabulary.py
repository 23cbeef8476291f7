"""One word for one concept, and the field's own: no name of a module, function, class or variable is a retired one."""

import ast
import importlib.util
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Retired words, and the term that is used in their place.
RETIRED = {
    "become": "fork server",
    "course": "history",
    "desk": "app context",
    "engines": "containers",
    "farewell": "exit message",
    "footprint": "disk usage",
    "heirs": "dependents",
    "keeper": "supervisor",
    "keeping": "checkpoint manager",
    "ledger": "goodput",
    "manners": "log filter",
    "notable": "timeline events",
    "parcel": "serialization",
    "patience": "restart policy",
    "pieces": "containers",
    "presence": "process discovery",
    "pulse": "heartbeat monitor",
    "refusals": "validation",
    "questions": "queue",
    "rehearsal": "dry run",
    "rehearse": "dry run",
    "roll": "liveness",
    "room": "memory",
    "remarks": "notes",
    "shelf": "checkpoint directory",
    "told": "message",
    "verdict": "restart policy",
    "whereabouts": "rank hosts",
    "zygote": "fork server",
}
# Everyday words, which a variable may have, but no file: there they hide what it is about.
RETIRED_FILES = {
    "answers": "queue",
    "before": "previous run",
    "guard": "non-finite guard",
    "look": "probe",
    "losses": "downtime",
    "place": "rank info",
    "quiet": "logging setup",
    "share": "resource allocation",
    "words": "text",
}
FILES = [path for package in ("cli/ddpctl", "trainer") for path in sorted((ROOT / package).rglob("*.py"))]


def words_of(name: str) -> list[str]:
    """The words of an identifier: snake_case and CamelCase, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    yield 0, path.stem
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def retired(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}: say {RETIRED[word]}"
        for line, name in identifiers(path)
        for word in words_of(name)
        if word in RETIRED
    ]


def test_no_name_has_a_retired_word() -> None:
    assert len(FILES) > 100
    assert [found for path in FILES for found in retired(path)] == []
    assert [path for path in FILES if RETIRED_FILES.keys() & {*words_of(path.stem)}] == []


@pytest.mark.parametrize("name", ["Zygote", "_told_all", "keeperPid", "shelf"])
def test_a_planted_name_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_vocabulary.ROOT", tmp_path)
    path = tmp_path / "planted.py"
    path.write_text(f"{name} = 1\n")
    assert len(retired(path)) == 1


def test_every_name_of_our_packages_that_is_imported_exists() -> None:
    """In the benchmarks, tests and examples as well, which mypy does not read; in a process apart, for the effects."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("cli", "trainer"))}
    done = subprocess.run([sys.executable, __file__], env=environ, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_fault_of_the_docs_names_tests_that_exist() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    text = page.partition("## Which test covers which fault\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|(.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [7, 8, *range(10, 14), 16, *range(18, 27), 29, 30]
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert len(named) > len(rows)
    assert [test for path, test in named if f"\ndef {test}(" not in (ROOT / path).read_text()] == []


def missing_names() -> Iterator[str]:
    for folder in ("cli", "trainer", "bench", "tests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
                if module and module.split(".")[0] in ("ddpctl", "ddprun", "ddptrain", "ddpwire"):
                    yield from (f"{path}: {module}.{name.name}" for name in node.names if not exists(module, name.name))


def exists(module: str, name: str) -> bool:
    try:
        return (
            hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
        )
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    for missing in missing_names():
        print(missing)
