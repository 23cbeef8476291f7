"""Every module of bench/ can be imported."""

import ast
import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"
RANKS = ("first_step", "scaling_rank")  # scripts of ranks, which train when they are imported


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in RANKS))
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", RANKS)
def test_a_benchmark_s_rank_finds_what_it_imports(name: str) -> None:
    tree = ast.parse((BENCH / f"{name}.py").read_text())
    tree.body = [statement for statement in tree.body if isinstance(statement, ast.Import | ast.ImportFrom)]
    exec(compile(tree, name, "exec"), {})  # noqa: S102
