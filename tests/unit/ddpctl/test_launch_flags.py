"""Each flag of launch, given once as a user types it, on a target that has it."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import typer
from tests.in_process import ddpctl, verbs

from ddpctl.commands.launch import FLAGS, Flags, request_of_flags, with_flags
from ddpctl.errors import DdpctlError
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run

FILE = """\
profiles: {long: {time_limit: 9h}}
targets:
  boxes: {kind: ssh, hosts: [b1, b2]}
  hpc: {kind: slurm}
  bare: {kind: slurm, environment: requirements.txt}
  lab: {kind: kubernetes}
  t4s: {kind: kaggle, owner: ann, wheel: none}
"""
# The flag, the arguments, and which value of the request they set.
ROWS = [
    ("nodes", "--nodes 2:4", "job.nodes", "2:4"),
    ("nodes", "-n 3", "job.nodes", "3"),
    ("spares", "-t hpc --nodes 3 --spares 1", "job.spares", 1),
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
    ("wheelhouse", "-t bare --wheelhouse .", "options.wheelhouse.__class__", str),  # an absolute path
    ("exclude", "-t boxes --exclude b1", "options.exclude", ("b1",)),
    ("command", "-- train.py --lr 0.1", "job.command", ("train.py", "--lr", "0.1")),
]
# The flags that only launch has: the flag, the arguments, and what launch does with the request.
OWN = [
    ("resume", "--resume night", ["start resumes=night wait_s=None attached=True", "follow"]),
    ("detach", "--detach", ["start resumes= wait_s=None attached=False"]),
    ("detach", "-d", ["start resumes= wait_s=None attached=False"]),
    ("pull", "--pull -t boxes", ["start resumes= wait_s=None attached=True", "follow", "pull"]),
    ("wait", "--wait 2h30m -t boxes", ["start resumes= wait_s=9000 attached=True", "follow"]),
    ("doctor", "--doctor", ["doctor", "start resumes= wait_s=None attached=True", "follow"]),
    ("dry_run", "--dry-run", ["dry run"]),
]
RUN = Run(
    name="night",
    job=JobSpec(),
    cwd="/p",
    folder="/r/night",
    checkpoint_dir="/r/night/checkpoints",
    created=1000.0,
    target="local",
    kind="local",
    options={},
    version="0",
    handle={"port": "1"},
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ddpctl.yaml").write_text(FILE)
    (tmp_path / "other.yaml").write_text("job: {gpus: 7}\n")
    (tmp_path / "train.py").touch()
    (tmp_path / "requirements.txt").write_text("torch==2.10.0\n")
    (tmp_path / "torch-2.10.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def request_of(project: Path) -> Callable[[str], Request]:
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
    assert {flag for flag, *_ in OWN} == {flag.name for flag in verbs()["launch"].params} - FLAGS.keys()
    assert {flag.name for flag in verbs()["render"].params} - FLAGS.keys() == {"out"}


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


@pytest.mark.parametrize(
    "arguments",
    ["-t lab --nodes 3 --spares 1", "-t t4s --spares 1", "-t hpc --nodes 2 --spares 2", "-t hpc -n 2:3 --spares 1"],
)
def test_spares_are_refused_where_they_cannot_help(request_of: Callable[[str], Request], arguments: str) -> None:
    with pytest.raises(DdpctlError, match="spares"):
        request_of(arguments)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("flag", "arguments", "expected"), OWN, ids=[row[1] for row in OWN])
def test_an_own_flag_of_launch_changes_what_launch_does(
    monkeypatch: pytest.MonkeyPatch, flag: str, arguments: str, expected: list[str]
) -> None:
    calls = []

    def start(_: AppContext, request: Request, *, attached: bool) -> Run:
        resumes = request.resumes.name if request.resumes else ""
        calls.append(f"start resumes={resumes} wait_s={request.wait_s} attached={attached}")
        return RUN

    def follow(*_: object, **options: object) -> tuple[RunStatus, int]:
        calls.append("follow")
        return RunStatus(run="night", state="succeeded", message="", code=0), 0

    def only_sound(_: object, request: Request) -> Request:
        calls.append("doctor")
        return request

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher, "follow", follow)
    monkeypatch.setattr(launcher, "pull", lambda *_: calls.append("pull"))
    monkeypatch.setattr(launcher, "dry_run", lambda *_: calls.append("dry run"))
    monkeypatch.setattr(launcher, "check_alone", lambda *_: None)
    monkeypatch.setattr("ddpctl.commands.launch.only_sound", only_sound)
    monkeypatch.setattr(run_store, "load", lambda *_, **__: RUN)
    done = ddpctl("launch", *arguments.split())
    assert (done.returncode, calls) == (0, expected), done.stderr


def test_render_writes_the_files_of_a_spec_into_the_folder_out(project: Path) -> None:
    done = ddpctl("render", "-t", "t4s", "--out", "specs")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["specs/train.ipynb", "specs/kernel-metadata.json"])
    assert {path.name for path in (project / "specs").iterdir()} == {"train.ipynb", "kernel-metadata.json"}
