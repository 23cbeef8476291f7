"""Each flag of launch, given once as a user types it, on a target that has it."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import typer
from tests.in_process import ddpctl

from ddpctl.commands.launch import FLAGS, Flags, request_of_flags, with_flags
from ddpctl.job.config import Request

FILE = """\
profiles: {long: {time_limit: 9h}}
targets:
  boxes: {kind: ssh, hosts: [b1, b2]}
  hpc: {kind: slurm}
  lab: {kind: kubernetes}
"""
# The flag, the arguments, and which value of the request they set.
ROWS = [
    ("nodes", "--nodes 2:4", "job.nodes", "2:4"),
    ("nodes", "-n 3", "job.nodes", "3"),
    ("gpus", "--gpus 4", "job.gpus", 4),
    ("ranks", "--gpus 4 --ranks 2", "job.ranks", 2),
    ("target", "--target boxes", "kind", "ssh"),
    ("target", "-t hpc", "target", "hpc"),
    ("file", "--file other.yaml", "job.gpus", 7),
    ("profile", "--profile long", "job.time_limit", "9h"),
    ("device", "--device cpu", "job.device", "cpu"),
    ("env", "--env A=1 -e B=x=y", "job.env", {"A": "1", "B": "x=y"}),
    ("name", "--name resnet-50", "name", "resnet-50"),
    ("port", "--port 29512", "job.port", 29512),
    ("max_restarts", "--max-restarts 3", "job.max_restarts", 3),
    ("cpus", "--cpus 6", "job.cpus", 6),
    ("memory", "--memory 64Gi", "job.memory", "64Gi"),
    ("mounts", "-t lab --mount pvc=a:/runs --mount /data:/data:ro", "job.mounts", ("pvc=a:/runs", "/data:/data:ro")),
    ("image", "--image r/i:1 -t boxes", "job.image", "r/i:1"),
    ("workload", "-t lab --kind trainjob", "options.workload", "trainjob"),
    ("replace_lost", "-t lab --replace-lost", "options.replace_lost", True),
    ("array", "-t hpc --array 0-3%2", "options.array", "0-3%2"),
    ("exclude", "-t boxes --exclude b1", "options.exclude", ("b1",)),
    ("command", "-- train.py --lr 0.1", "job.command", ("train.py", "--lr", "0.1")),
]


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Request]:
    (tmp_path / "ddpctl.yaml").write_text(FILE)
    (tmp_path / "other.yaml").write_text("job: {gpus: 7}\n")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    requests = []

    @with_flags
    def collect(flags: Flags) -> None:
        requests.append(request_of_flags(flags))

    app = typer.Typer()
    app.command()(collect)

    def parse(arguments: str) -> Request:
        app(arguments.split(), standalone_mode=False)
        return requests.pop()

    return parse


def test_each_flag_has_a_row() -> None:
    assert {flag for flag, *_ in ROWS} == FLAGS.keys()


def test_the_help_of_a_flag_is_the_documentation_of_its_field() -> None:
    done = ddpctl("launch", "--help")
    text = " ".join(done.stdout.split())
    for fact in (
        "Ranks per node, a divisor of gpus",
        "default: until three attempts",
        "Only for slurm: Run the job as",
    ):
        assert fact in text
    assert "null" not in text


@pytest.mark.parametrize(("flag", "arguments", "place", "value"), ROWS, ids=[row[1] for row in ROWS])
def test_a_flag_sets_its_value(
    request_of: Callable[[str], Request], flag: str, arguments: str, place: str, value: object
) -> None:
    assert attrgetter(place)(request_of(arguments)) == value
