"""ddpctl rm on runs whose nodes have really run: what it removes, keeps and refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.ddpctl.worlds import World

MONTH_S = 31 * 86400


def age(folder: Path) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"created": record["created"] - MONTH_S}))


def kept(root: Path) -> list[str]:
    """The runs that are there; beside them is the folder of Prometheus' targets."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_ended_runs_are_removed_and_others_are_not(world: Callable[[str], World], tmp_path: Path) -> None:
    site = world("local")
    root = site.runs
    assert site.ddpctl("launch", "--name", "day", "--", "train.py", "steps=1").returncode == 0
    site.enter("training")
    both = site.ddpctl("rm", "day", "night")
    assert (both.returncode, both.stdout, kept(root)) == (2, "", ["day", "night"]), "all of them, or none"

    (root / "day/checkpoints/step-1.pt").write_bytes(b"x" * 2_000_000)
    (root / "day/checkpoints/outside").symlink_to(tmp_path)
    assert site.ddpctl("launch", "--resume", "day", "--name", "day-2").returncode == 0
    assert site.ddpctl("rm", "day").returncode == 2, "the other run has its checkpoints"
    dry = site.ddpctl("rm", "--dry-run", "day", "day-2")
    assert (dry.returncode, kept(root)) == (0, ["day", "day-2", "night"])
    assert re.search(r"2\.\d MB", dry.stdout)

    for name in ("day", "night"):
        age(root / name)
    old = site.ddpctl("rm", "--older-than", "30d")
    assert (old.returncode, old.stdout, kept(root)) == (0, "", ["day", "day-2", "night"])
    age(root / "day-2")
    assert site.ddpctl("rm", "--older-than", "30d").returncode == 0
    assert kept(root) == ["night"]
    assert site.ddpctl("stop", "night", "--kill").returncode == 0
    assert site.ddpctl("rm", "night").returncode == 0
    assert kept(root) == []
    assert site.folder.is_dir()


@pytest.mark.parametrize("arguments", [(), ("--older-than", "month")])
def test_runs_or_an_age_are_required(arguments: tuple[str, ...], world: Callable[[str], World]) -> None:
    assert world("local").ddpctl("rm", *arguments).returncode == 2


@pytest.mark.parametrize("arguments", [(), ("--timestamps",), ("--rank", "1"), ("--rank", "9")], ids=" ".join)
def test_a_job_that_has_not_started_has_no_log(arguments: tuple[str, ...], world: Callable[[str], World]) -> None:
    site = world("slurm")
    site.enter("pending")
    assert site.ddpctl("logs", "night", *arguments).returncode == 66
    assert site.ddpctl("stop", "night").returncode == 0
    assert site.ddpctl("logs", "night", *arguments).returncode == 66  # it was cancelled in the queue
