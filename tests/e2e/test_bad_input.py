"""Bad input: the documented exit code, a line that names what is wrong, no traceback, and nothing left behind."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl, outcome_of
from tests.in_process import ddpctl as in_process

from ddpwire.run_files import NODE_LOG


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A command line, with a ddpctl.yaml, its exit code, and what its error message names."""

    args: str = "launch"
    yaml: str = ""
    code: int
    names: tuple[str, ...]


# One row for each class; tests/nightly/e2e has more of each.
TABLE = {
    "an unknown key": Bad(yaml="job: {nodse: 2}", code=78, names=("ddpctl.yaml:1:7:", "'nodse'", "'nodes'")),
    "a value of another type": Bad(yaml="job:\n  gpus: two", code=78, names=("ddpctl.yaml:2:9:", "gpus", "'two'")),
    "two errors": Bad(yaml="job:\n  nodes: 0\n  gpus: 99", code=78, names=("ddpctl.yaml:2:10:", "ddpctl.yaml:3:9:")),
    "more nodes than hosts": Bad(
        yaml="job:\n  nodes: 2\ntarget: boxes\ntargets:\n  boxes: {kind: ssh, hosts: [a]}", code=78,
        names=("ddpctl.yaml:2:10:", "nodes: 2", "1 host"),
    ),
    "corrupt YAML": Bad(yaml="job: [1,", code=78, names=("ddpctl.yaml:1:9:",)),
    "bytes that are not UTF-8": Bad(yaml="job: \xff", code=78, names=("ddpctl.yaml:1:6:", "0xff")),
    "a missing file": Bad(args="launch -f no.yaml", code=66, names=("no.yaml",)),
    "an impossible number": Bad(args="launch --gpus 65", code=2, names=("--gpus", "65", "64")),
    "a device that is not here": Bad(args="launch --device cuda", code=78, names=("--device cuda",)),
    "a missing script": Bad(args="launch -- no.py", code=66, names=("no.py",)),
    "a spec without its script": Bad(args="render -t slurm -- no.py", code=66, names=("no.py",)),
    "an unknown target": Bad(args="launch -t hpc", code=2, names=("--target", "'hpc'", "slurm")),
    "a Python that is not there": Bad(
        args="launch -t old", yaml="targets:\n  old: {kind: local, python: /usr/bin/no-python3}", code=69,
        names=("/usr/bin/no-python3",),
    ),
    "a variable that ddpctl sets": Bad(args="launch --env RANK=3", code=2, names=("--env", "RANK")),
    "a run that does not exist": Bad(args="status x", code=66, names=("/runs",)),
}  # fmt: skip


def check_bad_input(bad: Bad, folder: Path) -> None:
    if bad.yaml:
        (folder / "ddpctl.yaml").write_bytes(bad.yaml.encode("latin-1"))
    done = in_process(*bad.args.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (bad.code, "")
    assert [name for name in bad.names if name not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in folder.glob("runs/*")] == []


@pytest.mark.parametrize("bad", TABLE.values(), ids=TABLE.keys())
def test_bad_input_is_named_and_starts_nothing(bad: Bad, tmp_path: Path) -> None:
    check_bad_input(bad, tmp_path)


def test_an_unknown_flag_of_the_program_is_a_usage_error() -> None:
    done = ddpctl("launch", "--gpu", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert [name for name in ("--gpu", "--gpus", "ddpctl launch --help") if name not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_a_corrupt_checkpoint_is_refused_once_without_a_traceback(tmp_path: Path) -> None:
    """Two ranks see the same error. It is the run's, and its code is the run's exit code."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/step-00000010.pt").write_bytes(b"torn")
    done = ddpctl("launch", "--gpus", "2", "--name", "refused", "--", "--checkpoint-dir", f"{tmp_path}/ckpt")
    assert done.returncode == 65, done.stdout + done.stderr
    log = (tmp_path / "runs/refused/node-0" / NODE_LOG).read_text()
    printed = re.findall(r"^\[node0 rank([01])\] ddptrain: (?!warning: )", log, re.MULTILINE)
    assert printed in ([], ["0"]), log  # none: rank 1 was the first to exit, and says the same in the last line
    outcome = outcome_of(tmp_path, "refused")
    assert (outcome.code, outcome.cause, outcome.node) == (65, "error", 0)
    assert f"{tmp_path}/ckpt" in outcome.message
    assert log.count(f"[node0] {outcome.message}") == 1
    assert "Traceback" not in log + done.stderr
