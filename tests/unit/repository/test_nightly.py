"""Which parts of the nightly tests run: those whose paths have changed, as far as they fit into the time."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PARTS = """
short: {covers: [cli/ddpctl], run: [pytest tests/nightly/short]}
long: {covers: [cli/ddpctl/targets, slurm], run: [pytest tests/nightly/long -n 2, bench/exact.py --rows 1]}
"""


@pytest.fixture(scope="module")
def nightly() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nightly_run", ROOT / "tests/nightly/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nightly_run"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_part_covers_its_paths_its_tests_and_its_benchmarks(nightly: ModuleType) -> None:
    short, long = nightly.read_parts(PARTS)
    assert short.covers == ("cli/ddpctl", "tests/nightly/short")
    assert long.covers == ("cli/ddpctl/targets", "slurm", "tests/nightly/long", "bench/exact.py")
    assert long.commands == (
        ("-m", "pytest", "tests/nightly/long", "-n", "2"),
        ("bench/exact.py", "--rows", "1"),
    )


def test_a_part_is_selected_by_its_name_or_a_path_and_an_unknown_one_is_refused(nightly: ModuleType) -> None:
    selected = {"short": ["short"], "slurm": ["long"], "slurm/train.sbatch": ["long"], "cli": ["short", "long"],
                "cli/ddpctl/main.py": ["short"]}  # fmt: skip
    parts = nightly.read_parts(PARTS)
    assert {name: [part.name for part in nightly.select(parts, [name])] for name in selected} == selected
    with pytest.raises(SystemExit, match=r"shirt.*short, long"):
        nightly.select(parts, ["shirt"])


def test_parts_with_changed_paths_run_if_they_fit_and_others_are_named(nightly: ModuleType) -> None:
    parts = nightly.read_parts(PARTS)
    trees = {path: f"hash of {path}" for part in parts for path in part.covers}
    verified = {
        part.name: nightly.Passed(trees={path: trees[path] for path in part.covers}, seconds=seconds)
        for part, seconds in zip(parts, (100, 900), strict=True)
    }
    assert nightly.plan(parts, verified, trees, 0) == ([], [])
    changed = trees | {"cli/ddpctl": "another hash", "slurm": "another hash"}
    assert nightly.plan(parts, verified, changed, 1000) == (parts, [])
    to_run, left_out = nightly.plan(parts, verified, changed, 999)
    assert ([part.name for part in to_run], [part.name for part, _ in left_out]) == (["short"], ["long"])
    to_run, left_out = nightly.plan(parts, {}, trees, 1800)
    assert (to_run, [part for part, _ in left_out]) == ([], parts), "none has ever passed"


def test_each_part_exists_and_covers_paths_that_exist(nightly: ModuleType) -> None:
    parts = nightly.read_parts((ROOT / "tests/nightly/parts.yaml").read_text())
    assert [path for part in parts for path in part.covers if not (ROOT / path).exists()] == []
    folders = {part.name for part in parts} | {Path(path).name for part in parts for path in part.covers}
    tests = {path.name for path in (ROOT / "tests/nightly").iterdir() if any(path.glob("test_*.py"))}
    assert tests <= folders
