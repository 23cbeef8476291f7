"""ddpctl rm on real runs of this machine."""

import json
import re
from pathlib import Path

from tests.e2e.driver import SCRIPTS, ddpctl, events_of, wait_until
from tests.wording import Wording


def age(folder: Path, seconds: float) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"created": record["created"] - seconds}))


def kept(root: Path) -> list[str]:
    """The runs that are there; beside them is the folder of Prometheus' targets."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_runs_are_removed_and_others_are_not(tmp_path: Path, wording: Wording) -> None:
    root = tmp_path / "runs"
    assert ddpctl("launch", "--name", "day", "--", str(SCRIPTS / "ends.py")).returncode == 0
    assert ddpctl("launch", "-d", "--name", "night", "--", str(SCRIPTS / "idle.py")).returncode == 0
    wait_until(lambda: events_of(tmp_path, "night", "ranks_started"), "the rank")
    both = ddpctl("rm", "day", "night")
    assert (both.returncode, both.stdout) == (2, "")
    wording(re.sub(r"\(\w+\)", "({state})", both.stderr))
    assert (root / "day").is_dir(), "all of them, or none"

    (root / "day/checkpoints/step-1.pt").write_bytes(b"x" * 2_000_000)
    (root / "day/checkpoints/outside").symlink_to(tmp_path)
    assert ddpctl("launch", "--resume", "day", "--name", "day-2").returncode == 0
    heir = ddpctl("rm", "day")
    assert heir.returncode == 2
    wording(heir.stderr)
    dry = ddpctl("rm", "--dry-run", "day", "day-2")
    assert dry.returncode == 0, dry.stderr
    sizes = re.findall(r"[\d.]+ [kM]B", dry.stdout)
    assert re.fullmatch(r"2\.\d MB,2\.0 MB,[0-9.]+ kB", ",".join(sizes))
    wording(re.sub(r"[\d.]+ ([kM]B)", r"{size} \1", dry.stdout))
    assert (root / "day/checkpoints/step-1.pt").exists()

    for name in ("day", "night"):
        age(root / name, 31 * 86400)
    old = ddpctl("rm", "--older-than", "30d")
    assert (old.returncode, old.stdout) == (0, "")
    assert len(old.stderr.splitlines()) == 3, old.stderr
    age(root / "day-2", 31 * 86400)
    old = ddpctl("rm", "--older-than", "30d")
    assert (old.returncode, kept(root)) == (0, ["night"]), old.stderr
    assert ddpctl("stop", "night", "--kill").returncode == 0
    assert ddpctl("rm", "night").returncode == 0
    assert kept(root) == []
    assert (tmp_path / "runs").is_dir()


def test_runs_or_an_age_are_required(wording: Wording) -> None:
    neither = ddpctl("rm")
    assert neither.returncode == 2
    wording(neither.stderr)
    odd = ddpctl("rm", "--older-than", "month")
    assert odd.returncode == 2
    wording(odd.stderr)
