"""Each flag of launch, given once as a user types it, on a target that has it; and what of it the nodes are told."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import typer
from tests.in_process import ddpctl, verbs
from tests.messages import assert_names, refused
from tests.unit.ddpctl.records import run_of

from ddpctl.commands.launch import FLAGS, Flags, request_of_flags, request_to_resume, with_flags
from ddpctl.errors import ConfigError, DdpctlError
from ddpctl.job.launch_plan import Plan, Request, command_line, contract, ddprun_args, program, script_of, title
from ddpctl.job.spec import JobSpec, check_command
from ddpctl.operations import checks, launcher
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
    ("gpus", "--nodes 2 --gpus 4,2", "job.gpus", (4, 2)),
    ("gpus", "--nodes 2 --gpus [4,2]", "job.gpus", (4, 2)),
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
    ("command", "-- torchrun --nproc_per_node 2 train.py", "job.command", ("train.py",)),
    ("env", "-e B=2 -- accelerate launch --mixed_precision bf16 t.py", "job.env",
     {"ACCELERATE_MIXED_PRECISION": "bf16", "B": "2"}),
]  # fmt: skip
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
RUN = run_of(handle={"port": "1"})


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


REFUSED = {
    "spares": ("-t lab -n 3 --spares 1", "-t t4s --spares 1", "-t hpc -n 2 --spares 2", "-t hpc -n 2:3 --spares 1"),
    "--gpus 4": ("-g 4 -- torchrun --nproc_per_node 2 train.py",),  # which number?
    "--env": ("--env A",),
    "--name": ("--name Night",),
    "checkpoint_copies": ("-f copies.yaml",),
}


@pytest.mark.parametrize(("fact", "arguments"), [(fact, text) for fact, texts in REFUSED.items() for text in texts])
def test_what_a_target_cannot_do_and_what_contradicts_itself_is_refused(
    request_of: Callable[[str], Request], project: Path, fact: str, arguments: str
) -> None:
    (project / "copies.yaml").write_text("job: {nodes: 2, checkpoint_copies: 2}\n")
    with refused(DdpctlError, fact):
        request_of(arguments)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "arguments", ["--resume night -t hpc", "--resume night -f other.yaml", "--pull", "--pull -d -t boxes", "--wait 2h"]
)
def test_flags_of_launch_that_exclude_each_other_are_refused(arguments: str) -> None:
    done = ddpctl("launch", "--dry-run", *arguments.split())
    assert done.returncode == 2
    assert_names(done.stderr, arguments.split()[0])


@pytest.mark.usefixtures("project")
def test_what_others_could_see_and_what_nobody_expands_or_uses_is_named() -> None:
    flags = ("-t", "hpc", "--gpus", "2", "--ranks", "1", "--env", "HF_TOKEN=abcdefgh", "--env", "WHERE=$HOME")
    done = ddpctl("render", *flags, "--", "--api-key", "k3y-12345")
    assert done.returncode == 0
    assert_names(done.stderr, "HF_TOKEN", "--api-key", "WHERE", "1 of the 2 GPUs")


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "kaggle"])
def test_a_run_does_not_resume_with_what_its_target_cannot_run(kind: str) -> None:
    with refused(ConfigError, "gpus", kind, code=78):
        request_to_resume({"nodes": "2", "gpus": "2,1"}, run_of(kind=kind))


def test_a_run_with_copies_resumes_on_the_nodes_that_it_had_and_keeps_its_number_of_copies() -> None:
    hosts = {"hosts": [{"address": "b1"}, {"address": "b2"}, {"address": "b3"}]}
    old = run_of(kind="ssh", options=hosts, job=JobSpec(nodes="3", checkpoint_copies=3), handle={"nodes": "2"})
    request = request_to_resume({}, old)
    assert (request.job.nodes, request.job.checkpoint_copies, request.resumes) == ("2", 3, old)
    assert request_to_resume({"nodes": "1"}, old).job.nodes == "1", "fewer than have copies"


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
    monkeypatch.setattr(checks, "only_sound", only_sound)
    monkeypatch.setattr(run_store, "load", lambda *_, **__: RUN)
    done = ddpctl("launch", *arguments.split())
    assert (done.returncode, calls) == (0, expected), done.stderr


PROGRAMS = {
    (): ("-m", "ddptrain"),
    ("--epochs", "3"): ("-m", "ddptrain", "--epochs", "3"),
    ("ddptrain", "--epochs", "3"): ("-m", "ddptrain", "--epochs", "3"),
    ("train.py", "--lr", "0.1"): ("train.py", "--lr", "0.1"),
    ("python", "train.py"): ("train.py",),
    ("python3", "-m", "project.train", "-x"): ("-m", "project.train", "-x"),
    ("-m", "project.train"): ("-m", "project.train"),
}


@pytest.mark.parametrize(("command", "arguments"), PROGRAMS.items(), ids=lambda value: " ".join(value) or "nothing")
def test_a_command_becomes_the_program_that_ddprun_starts(command: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    assert program(command) == arguments


def test_a_command_has_a_script_a_title_without_arguments_and_a_line_for_a_shell() -> None:
    assert [script_of(("-m", "project.train")), script_of(("train.py", "x"))] == [None, "train.py"], (
        "a module is no file"
    )
    job = JobSpec(nodes="1:4", gpus=2, command=("src/train.py", "--lr", "1"))
    titles = ["1 node x 1 rank of ddptrain", "1:4 nodes x 2 ranks of src/train.py"]
    assert [title(JobSpec()), title(job)] == titles
    lines = {("train.py", "a b"): "train.py 'a b'", ("--epochs", "3"): "ddptrain --epochs 3", ("-m", "a.b"): "-m a.b"}
    assert {command: command_line(JobSpec(command=command)) for command in lines} == lines


def test_the_contract_and_arguments_of_a_node() -> None:
    job = JobSpec(
        nodes="2:3",
        gpus=4,
        command=("train.py", "--lr", "0.1"),
        grace=2.5,
        join_timeout=7,
        hang_timeout=0,
        max_restarts=1,
        checkpoint_copies=2,
    )
    plan = Plan(name="digits-otter", job=job, cwd="/p", folder="/r", checkpoint_dir="/r/checkpoints")
    assert plan.job.world_size == 12
    assert contract(plan, node=2, addr="10.0.0.1", port="40001") == {
        "PET_NNODES": "2:3",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "40001",
        "DDP_RUN_ID": "digits-otter",
        "DDP_RUN_DIR": "/r",
        "DDP_CHECKPOINT_DIR": "/r/checkpoints",
        "DDP_SECRET_FILE": "/r/store.secret",
    }
    launched = replace(plan, uid="0a1b2c3d4e5f", user="ann")
    environ = contract(launched, node=2, addr="10.0.0.1", port="40001").items()
    assert environ - contract(plan, node=2, addr="10.0.0.1", port="40001").items() == {
        ("DDP_RUN_UID", "0a1b2c3d4e5f"),
        ("DDP_USER", "ann"),
    }
    assert " ".join(ddprun_args(plan)) == (
        "--grace 2.5 --restart-limit 1 --join-timeout 7 --hang-timeout 0 --checkpoint-copies 2 train.py --lr 0.1"
    )


@pytest.mark.parametrize(
    ("handle", "job", "resumes"),
    [
        ({"pids": [7]}, JobSpec(), ()),  # ddpctl itself sees whether there is a checkpoint
        ({"logs": "box1:~/runs/night"}, JobSpec(), ("--resumes", "night")),
        ({"logs": "box1:~/runs/night"}, JobSpec(checkpoint_dir="s3://bucket"), ()),  # ddptrain looks there
    ],
)
def test_the_nodes_are_told_which_run_they_resume_if_only_they_see_its_checkpoints(
    handle: dict[str, object], job: JobSpec, resumes: tuple[str, ...]
) -> None:
    old = run_of(kind="ssh", job=job, handle=handle)
    request = launcher.Request(job=job, target="t", kind="ssh", options=None, target_source="", cwd="/p", resumes=old)
    assert ddprun_args(launcher.plan_of(request, "night-2", Path("/r/night-2")))[-len(resumes) - 2 : -2] == resumes


@pytest.mark.parametrize(
    "command", [("",), ("-m",), ("-m", ""), ("python", ""), ("python3", "-m"), ("a\0b",)], ids=repr
)
def test_a_command_without_a_program_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty|module|NUL"):
        check_command(command)
    assert check_command(("-m", "train", "")) == ("-m", "train", "")
