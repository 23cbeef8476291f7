"""The target slurm: what is checked before a job is sent, the command lines of its verbs, and the states of a job."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names
from tests.unit.ddpctl.answers import Answer, only, perform
from tests.unit.ddpctl.records import run_of

from ddpctl.command import Command, Host, Output
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import Probe
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery, StopSignal, Submission
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.queue import read_answers
from ddpctl.targets.slurm.target import SlurmTarget
from ddpwire.exits import Exit

UID = "1f2a3b4c5d6e"
JOB = JobSpec(name="digits", nodes="2", gpus=2, command=("ddptrain",))
PLAN = Plan(name="night", job=JOB, cwd="/p", folder="/r/night", checkpoint_dir="/r/night/checkpoints", uid=UID)
HANDLE = {"job": "7", "dir": "/r/night", "workdir": "/p"}
RUN = run_of(target="hpc", kind="slurm", job=JOB, folder="/r/night", handle=HANDLE)
DEFAULTS = SlurmOptions()
NONE, GONE = Output(returncode=1), Output(returncode=127)
FAILED = "sbatch: error: Batch job submission failed: "
NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"
TESTED = Output(
    returncode=0,
    stderr="sbatch: Job 4 to start at 2026-11-20T13:01:08 using 2 processors on nodes n[0-1] in partition debug\n",
)
SENT = Output(returncode=0, stdout="7\n")
ANSWERS: dict[str, Answer] = {
    "printenv HOME": Output(returncode=0, stdout="/home/me\n"),
    "--test-only": TESTED,
    "--parsable": SENT,
    "sinfo": Output(returncode=0, stdout="debug* 3 8 8000 gpu:1\ncpu 9 64 512000 (null)\n"),
}


def submit(
    answers: Mapping[str, Answer] = MappingProxyType({}),
    *,
    plan: Plan = PLAN,
    options: SlurmOptions = DEFAULTS,
    **environ: str,
) -> tuple[list[Command], Submission]:
    """What a launch runs, and its submission; ``answers`` are those that differ from a cluster that takes the job."""
    return perform(SlurmTarget(options, environ).submit(plan, attached=True), ANSWERS | dict(answers))


def test_a_login_node_has_folders_of_its_own() -> None:
    options = SlurmOptions(login="me@hpc:2222")
    commands, submission = submit(options=options)
    assert {command.host for command in commands} == {Host(address="hpc", user="me", port=2222)}
    assert only(commands, "--parsable").argv == (
        "sbatch", "--job-name=night", "--output=/home/me/.local/state/ddpctl/runs/night/job.log", "--chdir=/home/me",
        "--parsable", "/home/me/.local/state/ddpctl/runs/night/job.sh", UID,
    )  # fmt: skip
    run_dir = "/home/me/.local/state/ddpctl/runs/night"
    assert submission.handle == {"job": "7", "dir": run_dir, "workdir": "/home/me", "logs": f"hpc:{run_dir}"}
    resumed = replace(PLAN, name="night-2", folder="/r/night-2", checkpoint_dir="/r/night/checkpoints")
    _, submission = submit(options=options, plan=resumed)
    assert submission.checkpoint_dir == f"{run_dir}/checkpoints"


def test_render_uses_the_folders_of_the_target(tmp_path: Path) -> None:
    project = tmp_path / "its project"
    project.mkdir()

    def render(**folders: object) -> tuple[int, str, str]:
        target = {"kind": "slurm", "runs": "/srv/runs", **folders}
        text = {"job": {"command": ["train.py"]}, "target": "hpc", "targets": {"hpc": target}}
        (tmp_path / "ddpctl.yaml").write_text(json.dumps(text))
        done = ddpctl("render", cwd=tmp_path, PATH=os.defpath)
        return done.returncode, done.stdout, done.stderr

    code, _, message = render(workdir=str(project))
    assert (code, message) == (Exit.NO_INPUT, f"ddpctl: train.py: no such script in {project}\n")
    (project / "train.py").touch()
    code, script, _ = render(workdir=str(project))
    assert (code, f"#SBATCH --chdir='{project}'\n" in script, ":-/srv/runs/" in script) == (0, True, True)
    for folders in ({"workdir": "/none/here"}, {"workdir": "/none/here", "login": "hpc"}):  # unknown is no failure
        code, script, _ = render(**folders)
        assert (code, "#SBATCH --chdir=/none/here\n" in script) == (0, True)


def test_secrets_go_through_a_file_that_nobody_else_reads() -> None:
    plan = replace(PLAN, job=replace(JOB, secrets=("TOKEN",)))
    environ = {"TOKEN": "it's"}
    commands, _ = submit(plan=plan, **environ)
    (written,) = (command for command in commands if command.secret)
    assert written.argv == ("sh", "-c", 'mkdir -p "${1%/*}" && umask 077 && cat >"$1"', "ddpctl", "/r/night/secrets")
    assert written.stdin == "export TOKEN='it'\"'\"'s'\n"
    assert not any("it's" in (command.stdin or "") for command in commands if not command.secret)
    # Only sbatch can start an array, also in an allocation; it replaces what follows a single % in --output.
    plan = replace(plan, folder="/r/9%night")
    commands, _ = submit(plan=plan, options=SlurmOptions(array="0-1"), SLURM_JOB_ID="9", **environ)
    paths = [command.argv[-1] for command in commands if command.secret]
    assert paths == ["/r/9%night/task-0/secrets", "/r/9%night/task-1/secrets"]
    assert "--output=/r/9%%night/job-%a.log" in only(commands, "--parsable").argv


@pytest.mark.parametrize(
    ("sent", "error", "facts"),
    [
        (
            Output(returncode=1, stderr=f"{FAILED}Requested node configuration is not available\n"),
            ConfigError,
            ("2 nodes of 2 GPUs", "Requested node configuration is not available", "3 nodes with 8 CPUs", "no GPU"),
        ),
        (
            Output(returncode=1, stderr=f"{FAILED}Invalid partition name specified\n"),
            ConfigError,
            ("Invalid partition name specified", "debug*", "cpu"),
        ),
        (Output(returncode=124, stderr="no answer within 120 s"), UnavailableError, ("no answer within 120 s",)),
        (Output(returncode=1, stderr=f"{FAILED}{NO_CONTROLLER}\n"), UnavailableError, (NO_CONTROLLER,)),
    ],
    ids=["nodes", "partition", "no-answer", "no-controller"],
)
def test_a_job_that_slurm_does_not_take_is_refused_with_slurm_s_reason(
    sent: Output, error: type[DdpctlError], facts: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        submit({"--parsable": sent, "printenv": Output(returncode=0, stdout="SBATCH_ACCOUNT=me\n")})
    facts = (*facts, "SBATCH_ACCOUNT=me") if error is ConfigError else facts
    assert [fact for fact in facts if fact not in str(raised.value)] == []


def log_files(query: LogQuery, run: Run = RUN) -> tuple[str, ...]:
    """What is asked about a run's logs: the job, the number of lines, and a prefix and a path for each file."""
    command = only(perform(SlurmTarget(DEFAULTS).logs(run, query), {})[0])
    assert (command.mode, command.timeout_s) == ("stream", None)
    assert command.argv[2] == (queue.FOLLOW if query.follow else queue.PRINT)
    return command.argv[4:]


def test_logs_are_those_of_the_job_or_of_some_nodes_or_ranks() -> None:
    assert log_files(LogQuery(follow=True)) == ("7", "+1", "", "/r/night/job.log")
    both = ("[node1 rank2] ", "/r/night/node-1/rank-2.log", "[node1 rank3] ", "/r/night/node-1/rank-3.log")
    assert log_files(LogQuery(nodes=(1,), tail=5)) == ("7", "5", *both), "there is no node.log on Slurm"
    assert log_files(LogQuery(ranks=(3,))) == ("7", "+1", "[node1 rank3] ", "/r/night/node-1/rank-3.log")
    with pytest.raises(NoInputError, match="'night'"):
        perform(SlurmTarget(DEFAULTS).logs(RUN, LogQuery(ranks=(9,))), {"": Output(returncode=66)})


def test_a_task_of_an_array_is_a_run_of_its_own() -> None:
    array = replace(RUN, handle=RUN.handle | {"tasks": ["0", "4"], "logs": "hpc:/r/night"})
    assert SlurmTarget(DEFAULTS).tasks(RUN) == ()
    _, task = SlurmTarget(DEFAULTS).tasks(array)
    assert (task.name, task.checkpoint_dir) == ("night.task-4", "/r/night/task-4/checkpoints")
    assert task.job.env == {"SLURM_ARRAY_TASK_ID": "4"}
    assert (task.handle["job"], task.handle["dir"], task.logs_at) == ("7_4", "/r/night/task-4", "hpc:/r/night/task-4")
    assert log_files(LogQuery(), task) == ("7_4", "+1", "", "/r/night/job-4.log")
    with pytest.raises(ConfigError, match="array"):
        log_files(LogQuery(timestamps=True), array)


@pytest.mark.parametrize(
    ("signal", "wait", "code", "gone", "wait_s"),
    [("TERM", True, 1, False, "45"), ("INT", False, 1, False, "0"), ("KILL", True, 0, True, "60")],
)
def test_stop_signals_the_job_and_says_whether_it_has_ended(
    signal: StopSignal, wait: bool, code: int, gone: bool, wait_s: str
) -> None:
    commands, ended = perform(SlurmTarget(DEFAULTS).stop(RUN, signal=signal, wait=wait), {"": Output(returncode=code)})
    assert only(commands).argv[2:] == (queue.STOP, "ddpctl", "7", signal, wait_s, "/r/night")
    assert ended is gone


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("launch", "--array", "0-3"), "local"),
        (("render", "--target", "slurm", "--array", "0-3;x"), "'0-3;x'"),
        (("render", "--target", "slurm", "--array", "3-0"), "3-0"),
    ],
)
def test_an_array_is_refused_on_another_target_and_if_it_is_no_range(arguments: tuple[str, ...], fact: str) -> None:
    done = ddpctl(*arguments)
    assert (done.returncode, "--array: " in done.stderr, fact in done.stderr) == (2, True, True)


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """The folder of a run, with stand-ins of Slurm's programs in ``bin``; what scancel is told is in ``told``."""
    (tmp_path / "bin").mkdir()
    log_line = f'echo "$*" >>{tmp_path}/told'
    programs = {"squeue": 'eval "$SQUEUE"', "scancel": log_line, "sleep": "", "sacct": "exit 1", "scontrol": ""}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_script(folder: Path, script: str, squeue: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of the login node for the run in this folder, where squeue answers so."""
    argv = ["/bin/sh", "-c", script, "ddpctl", *arguments]
    env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "SQUEUE": squeue}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=False)


ON_LOGIN = SlurmOptions(login="hpc", workdir="/p", runs="/r")
SCRIPT = replace(PLAN, job=replace(PLAN.job, command=("train.py",)))


def refused(reason: str) -> Output:
    """The answer of sbatch --test-only."""
    return Output(returncode=1, stderr=f"allocation failure: {reason}\n")


@pytest.mark.parametrize(
    ("tested", "cause"),
    [
        pytest.param(GONE, "not installed", id="no-sbatch"),
        pytest.param(Output(returncode=124, stderr="no answer within 30 s"), "no answer within 30 s", id="no-answer"),
    ],
)
def test_a_machine_without_slurm_is_refused_before_anything_is_made(tested: Output, cause: str) -> None:
    commands: list[Command] = []
    with pytest.raises(UnavailableError) as raised:
        perform(SlurmTarget(DEFAULTS).submit(PLAN, attached=True), ANSWERS | {"--test-only": tested}, commands)
    assert (cause in raised.value.message, "'login'" in raised.value.hint) == (True, True)
    assert [command for command in commands if not command.probe] == []


@pytest.mark.parametrize(
    ("tested", "cause"),
    [(GONE, "not installed"), (Output(returncode=255, stderr="no answer from hpc:22\n"), "no answer from hpc:22")],
)
def test_a_login_node_that_has_no_slurm_or_does_not_answer_is_named(tested: Output, cause: str) -> None:
    with pytest.raises(UnavailableError) as raised:
        submit({"--test-only": tested}, options=ON_LOGIN)
    assert ("hpc" in raised.value.message, cause in raised.value.message) == (True, True)


LOOK = "test -f train.py"


@pytest.mark.parametrize(("options", "place"), [(DEFAULTS, "/p"), (ON_LOGIN, "/p on hpc")])
def test_a_script_that_is_not_there_is_refused(options: SlurmOptions, place: str) -> None:
    with pytest.raises(NoInputError) as raised:
        submit({LOOK: NONE}, plan=SCRIPT, options=options)
    assert ("train.py" in raised.value.message, raised.value.message.endswith(place)) == (True, True)


DRY_RUN = {"--parsable": Output(returncode=0, stdout="<job>")}


@pytest.mark.parametrize(
    ("tested", "fact"),
    [(TESTED, "2026-11-20T13:01:08"), (refused("Requested nodes are busy"), "Requested nodes are busy")],
)
def test_a_dry_run_notes_when_the_job_would_start_or_why_it_may_not(tested: Output, fact: str) -> None:
    listing = Output(returncode=0, stdout="SBATCH_ACCOUNT=me\n")
    assert_names(submit(DRY_RUN | {"--test-only": tested, "printenv": listing})[1].note, fact, "SBATCH_ACCOUNT")
    with pytest.raises(ConfigError, match="Invalid partition"):  # as the launch would
        submit(DRY_RUN | {"--test-only": refused("Invalid partition name specified")})


@pytest.mark.parametrize(
    ("how", "squeue", "code", "cancelled"),
    [
        ("INT", "echo 'COMPLETED|'", 0, ["--state=PENDING 7", "--batch --signal=INT 7"]),
        ("KILL", "echo 'COMPLETED|'", 0, ["--state=PENDING 7", "--batch --signal=USR2 7", "7"]),
        ("TERM", "exit 1", 69, ["--state=PENDING 7", "--batch --signal=USR2 7"]),
    ],
    ids=["Ctrl-C", "kill", "no-answer"],
)
def test_a_stop_ends_when_the_job_has_ended_and_is_no_success_while_slurm_does_not_answer(
    how: str, squeue: str, code: int, cancelled: list[str], slurm: Path
) -> None:
    (slurm / "secrets").touch()
    assert run_script(slurm, queue.STOP, squeue, "7", how, "9", str(slurm)).returncode == code
    assert (slurm / "told").read_text().splitlines() == [f"--quiet {rest}" for rest in cancelled]
    assert (slurm / "secrets").exists() == (code != 0)
    assert (slurm / "node-0/outcome.json").exists() == (how == "KILL")


def test_a_run_inside_an_allocation_is_located_by_its_starts(slurm: Path) -> None:
    (slurm / "job.sh").touch()
    (slurm / "starts").write_text("slurm @12:7 0 20 900\n")
    os.utime(slurm / "job.sh", (1, 1))
    answer = run_script(slurm, queue.LOCATE, "", UID, str(slurm), "1")
    located = Output(returncode=answer.returncode, stdout=answer.stdout)
    handle = perform(SlurmTarget(DEFAULTS).locate(RUN), {"": located})[1].handle
    assert (handle["job"], handle["pid"]) == ("7", "12")


def test_the_time_of_a_start_is_when_its_nodes_were_placed() -> None:
    command = only(perform(SlurmTarget(DEFAULTS).probe(RUN, Probe(placed=True)), {"": NONE})[0])
    assert "cut -d' ' -f5 /r/night/starts" in str(command.stdin)


DATA = Path(__file__).parents[2] / "data" / "slurm"


def status(text: str, *, run: Run = RUN, now: float = 5000.0) -> RunStatus:
    commands, (state,) = perform(
        SlurmTarget(SlurmOptions()).status((run,), now=now), {"": Output(returncode=0, stdout=text)}
    )
    assert only(commands).argv[:5] == ("sh", "-c", queue.ASK, "ddpctl", run.handle["job"])
    return state


def answered(squeue: str, *files: tuple[str, str]) -> str:
    return f"==> squeue <==\n{squeue}\n" + "".join(f"==> /r/night/{path} <==\n{text}\n\n" for path, text in files)


UNREACHED = "Unable to contact slurm controller"
NODE = '{"run": "night", "node": 0, "pid": 3, "state": "training", "started": 1.0, "metrics": "http://n0:1/metrics"}'
SAVED = '{"code": 143, "cause": "stopped", "message": "stopped by SIGTERM", "retry": true, "step": 40}'
BOTH_RUN = (("node-0/node.json", NODE), ("node-1/node.json", NODE))
BOTH_SAVED = (("node-0/outcome.json", SAVED), ("node-1/outcome.json", SAVED))


@pytest.mark.parametrize(
    ("text", "state", "code", "fact"),
    [
        (answered("7|N/A|PENDING|Resources|2026-11-20T14:00:00|"), "pending", None, "2026-11-20T14:00:00"),
        (answered("7|N/A|PENDING|BeginTime|N/A|", ("node-0/outcome.json", SAVED)), "pending", None, "BeginTime"),
        (answered("7|N/A|RUNNING|None|2026-11-20T13:00:00|n[0-1]"), "starting", None, "2 of 2"),
        (answered("7|N/A|COMPLETING|None|x|n[0-1]", *BOTH_SAVED), "stopping", None, "COMPLETING"),
        (answered("7|N/A|FAILED|NonZeroExitCode|x|n[0-1]", *BOTH_SAVED[:1]), "stopped", 143, "stopped by SIGTERM"),
        (answered("7|N/A|NODE_FAIL|None|x|n[0-1]", *BOTH_RUN[:1]), "failed", 137, "job.log"),
        (answered("7|N/A|CANCELLED|None|x|"), "stopped", 143, "CANCELLED"),
        (answered("7|N/A|CANCELLED|None|x|", *BOTH_RUN), "stopped", 137, "job.log"),
        (answered("7|N/A|CONFIGURING|None|x|\n7|N/A|NODE_FAIL|None|x|"), "starting", None, "CONFIGURING"),
        (answered("", *BOTH_SAVED[1:]), "stopped", 143, "stopped by SIGTERM"),
        (answered(""), "lost", 137, "job.log"),
        (answered(f"error: slurm_load_jobs error: {UNREACHED}"), "unknown", None, UNREACHED),
    ],
    ids=["Resources", "requeued", "starting", "COMPLETING",
         "FAILED", "NODE_FAIL", "CANCELLED", "killed", "first-line", "outcome-alone", "nothing", "no-controller"],
)  # fmt: skip
def test_the_state_of_a_job_follows_from_squeue_and_its_nodes_files(
    text: str, state: str, code: int | None, fact: str
) -> None:
    job = status(text)
    assert (job.state, job.code, fact in job.message) == (state, code, True)


def test_a_job_waits_for_the_success_of_another_run_and_leaves_the_queue_if_that_fails() -> None:
    record, going = Output(returncode=0, value=RUN), answered("7|N/A|RUNNING|None|x|n0")
    answers = {"==> squeue": Output(returncode=0, stdout=going), "run_store.read": record, **ANSWERS}
    commands, _ = perform(SlurmTarget(SlurmOptions(after="night"), {}).submit(PLAN, attached=True), answers)
    sent = only(commands, "--parsable /r/night/job.sh").argv
    assert {"--dependency=afterok:7", "--kill-on-invalid-dep=yes"} <= {*sent}


def test_a_job_that_never_started_has_no_log() -> None:
    cancelled = "7|N/A|CANCELLED|None|x|"
    assert not status(answered(cancelled)).has_logs
    assert status(answered(""), now=1005.0).state == "starting", "Slurm may not know it yet"
    assert status(answered(cancelled, ("starts", "slurm 7 0 20 900\n"))).has_logs


def test_answers_of_slurm_22_05_are_read() -> None:
    """From the lab's Slurm 22.05: an array at work, a job that waits for it, and one that was never there."""
    answers = read_answers((DATA / "ask-22.05.txt").read_text())
    assert [(job.id, job.task, job.state, job.reason) for job in answers.jobs] == [
        ("1", "2", "succeeded", "None"),
        ("1", "4", "pending", "JobArrayTaskLimit"),
        ("1", "3", "running", "None"),
        ("4", None, "pending", "Resources"),
    ]
    assert [Path(path).name for path in answers.files] == ["node.json", "outcome.json"]
