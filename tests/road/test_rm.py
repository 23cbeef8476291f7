"""ddpctl rm on real runs of this machine."""

import json
import re
from pathlib import Path

from tests.road.driver import SCRIPTS, ddpctl, node_log, wait_until


def age(folder: Path, seconds: float) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"created": record["created"] - seconds}))


def kept(root: Path) -> list[str]:
    """The runs that are there; beside them is the folder of Prometheus' targets."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_runs_are_removed_and_others_are_not(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert ddpctl("launch", "--name", "day", "--", str(SCRIPTS / "ends.py")).returncode == 0
    assert ddpctl("launch", "-d", "--name", "night", "--", str(SCRIPTS / "idle.py")).returncode == 0
    wait_until(lambda: "started (attempt 1)" in node_log(tmp_path, "night"), "the rank")
    both = ddpctl("rm", "day", "night")
    assert (both.returncode, both.stdout) == (2, "")
    assert re.fullmatch(r"ddpctl: night goes on \(\w+\), and was not removed: ddpctl stop night ends it\n", both.stderr)
    assert (root / "day").is_dir(), "all of them, or none"

    (root / "day/checkpoints/step-1.pt").write_bytes(b"x" * 2_000_000)
    (root / "day/checkpoints/outside").symlink_to(tmp_path)
    assert ddpctl("launch", "--resume", "day", "--name", "day-2").returncode == 0
    heir = ddpctl("rm", "day")
    assert (heir.returncode, heir.stderr) == (
        2,
        "ddpctl: day has the checkpoints of day-2, and was not removed: ddpctl rm day day-2 removes all of them\n",
    )
    dry = ddpctl("rm", "--dry-run", "day", "day-2")
    assert dry.returncode == 0, dry.stderr
    first, folder, second, *rest = dry.stdout.splitlines()
    assert re.fullmatch(r"run day would be removed: 2\.\d MB would be freed, 2\.0 MB of it checkpoints", first)
    assert folder == f"  folder  {root}/day"
    assert re.fullmatch(r"run day-2 would be removed: [0-9.]+ kB would be freed, no checkpoint among it", second)
    assert rest == [f"  folder  {root}/day-2"]
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


def test_what_is_asked_for_must_be_said() -> None:
    neither = ddpctl("rm")
    assert (neither.returncode, neither.stderr) == (
        2,
        "ddpctl: rm: name runs, or give --older-than 30d (ddpctl ps lists them)\n",
    )
    odd = ddpctl("rm", "--older-than", "month")
    assert (odd.returncode, odd.stderr) == (
        2,
        "ddpctl: --older-than: 'month' is not allowed: a whole number and s, m, h or d, such as 30d\n",
    )
