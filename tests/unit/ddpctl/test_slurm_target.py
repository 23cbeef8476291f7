"""The verbs of the target slurm: whole command lines, and what they make of recorded answers (tests/data/slurm)."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.in_process import ddpctl
from tests.wording import Wording

from ddpctl.command import Command, Host, Output, T, Verb
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.launch_plan import Plan
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec
from ddpctl.targets import LogQuery, Submission, default_kind
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.batch_script import render_script
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

JOB = JobSpec(name="digits", nodes="2", gpus=2, command=("ddptrain",))
PLAN = Plan(run="night", job=JOB, cwd="/p", run_dir="/r/night", checkpoint_dir="/r/night/checkpoints")
RUN = Run(
    name="night",
    created=1000.0,
    target="hpc",
    kind="slurm",
    options={},
    job=JOB,
    cwd="/p",
    folder="/r/night",
    checkpoint_dir="/r/night/checkpoints",
    version="0.1.0",
    handle={"job": "7", "dir": "/r/night", "workdir": "/p"},
)
DEFAULTS = SlurmOptions()
OK, NONE, GONE = Output(returncode=0), Output(returncode=1), Output(returncode=127)
FAILED = "sbatch: error: Batch job submission failed: "
SBATCH = ("sbatch", "--job-name=night", "--output=/r/night/job.log", "--chdir=/p")
TESTED = Output(
    returncode=0,
    stderr="sbatch: Job 4 to start at 2026-11-20T13:01:08 using 2 processors on nodes n[0-1] in partition debug\n",
)


def play(verb: Verb[T], answers: Iterable[tuple[Output, ...]]) -> tuple[list[Command], T]:
    """What a verb asks when it is sent these answers, one by one, and what it returns."""
    asked = [*next(verb)]
    try:
        for answer in answers:
            asked += verb.send(answer)
    except StopIteration as stop:
        return asked, stop.value
    raise AssertionError(f"it wants another answer, to {asked[-1]}")


def submit(*answers: Output, plan: Plan = PLAN, options: SlurmOptions = DEFAULTS) -> tuple[list[Command], Submission]:
    return play(SlurmTarget(options).submit(plan, attached=True), [(answer,) for answer in answers])


def test_submit_asks_when_it_would_start_and_sends_the_script(wording: Wording) -> None:
    asked, submission = submit(NONE, TESTED, OK, Output(returncode=0, stdout="7;lab\n"))
    script = render_script(PLAN, SlurmOptions())
    assert asked == [
        Command(argv=("printenv", "SLURM_JOB_ID"), probe=True),
        Command(argv=(*SBATCH, "--test-only"), stdin=script, probe=True),
        Command(argv=("mkdir", "-p", "/r/night")),
        Command(argv=(*SBATCH, "--parsable"), stdin=script, placeholder="<job>", timeout_s=120),
    ]
    assert submission == Submission(
        handle={"job": "7", "dir": "/r/night", "workdir": "/p"},
        note=submission.note,
        checkpoint_dir="/r/night/checkpoints",
    )
    wording(submission.note)
    assert "run_dir=/r/night\n" in script
    assert "workdir=/p\n" in script


def test_a_login_node_has_folders_of_its_own() -> None:
    options = SlurmOptions(login="me@hpc")
    home = Output(returncode=0, stdout="/home/me\n")
    asked, submission = submit(home, TESTED, OK, Output(returncode=0, stdout="7\n"), options=options)
    assert {command.host for command in asked} == {Host(address="hpc", user="me")}
    assert asked[-1].argv == (
        "sbatch", "--job-name=night", "--output=/home/me/.local/state/ddpctl/runs/night/job.log", "--chdir=/home/me",
        "--parsable",
    )  # fmt: skip
    run_dir = "/home/me/.local/state/ddpctl/runs/night"
    assert submission.handle == {"job": "7", "dir": run_dir, "workdir": "/home/me", "logs": f"hpc:{run_dir}"}
    resumed = replace(PLAN, run="night-2", run_dir="/r/night-2", checkpoint_dir="/r/night/checkpoints")
    _, submission = submit(home, TESTED, OK, Output(returncode=0, stdout="8\n"), options=options, plan=resumed)
    assert submission.checkpoint_dir == f"{run_dir}/checkpoints"


def test_secrets_go_through_a_file_that_nobody_else_reads() -> None:
    plan = replace(PLAN, job=replace(JOB, secrets=("TOKEN",)))
    value = Output(returncode=0, stdout="it's\n")
    asked, _ = submit(value, NONE, TESTED, OK, OK, Output(returncode=0, stdout="7\n"), plan=plan)
    (written,) = (command for command in asked if command.secret)
    assert written.argv == ("sh", "-c", 'umask 077; mkdir -p "${1%/*}" && cat >"$1"', "ddpctl", "/r/night/secrets")
    assert written.stdin == "export TOKEN='it'\"'\"'s'\n"
    assert not any("it's" in (command.stdin or "") for command in asked if not command.secret)
    array = SlurmOptions(array="0-1")
    asked, _ = submit(value, TESTED, OK, OK, OK, Output(returncode=0, stdout="7\n"), plan=plan, options=array)
    paths = [command.argv[-1] for command in asked if command.secret]
    assert paths == ["/r/night/task-0/secrets", "/r/night/task-1/secrets"]


def test_a_job_after_another_run_and_an_array(wording: Wording) -> None:
    record = Output(returncode=0, stdout=json.dumps({"handle": {"job": "5"}}))
    options = SlurmOptions(after="day", array="0-2%2")
    asked, submission = submit(record, TESTED, OK, Output(returncode=0, stdout="7\n"), options=options)
    assert asked[0] == Command(argv=("cat", "/r/day/run.json"), probe=True)
    assert asked[-1].argv == (
        "sbatch", "--job-name=night", "--output=/r/night/job-%a.log", "--chdir=/p", "--dependency=afterok:5",
        "--kill-on-invalid-dep=yes", "--parsable",
    )  # fmt: skip
    assert submission.handle["tasks"] == ["0", "1", "2"]
    with pytest.raises(NoInputError) as raised:
        play(SlurmTarget(SlurmOptions(after="day")).submit(PLAN, attached=False), [(NONE,), (NONE,)])
    wording(raised.value)


def test_inside_of_an_allocation_its_nodes_are_used(wording: Wording) -> None:
    asked, submission = submit(Output(returncode=0, stdout="99\n"), OK, Output(returncode=0, stdout="1234\n"))
    assert asked[1].argv[-1] == "/r/night/job.sh"
    assert asked[2] == Command(
        argv=("bash", "/r/night/job.sh"), cwd="/p", mode="background", output="/r/night/job.log", placeholder="<pid>"
    )
    assert submission.handle == {"job": "99", "pid": "1234", "dir": "/r/night", "workdir": "/p"}
    wording(submission.note)
    inside, outside = default_kind({"SLURM_JOB_ID": "99"}), default_kind({})
    assert (inside[0], outside[0]) == ("slurm", "local")
    wording(inside[1])
    wording(outside[1])


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (Output(returncode=1, stderr=f"{FAILED}Requested node configuration is not available\n"), ConfigError),
        (Output(returncode=1, stderr=f"{FAILED}Invalid partition name specified\n"), ConfigError),
        (Output(returncode=124, stderr="no answer within 120 s"), UnavailableError),
    ],
    ids=["nodes", "partition", "no-answer"],
)
def test_why_a_job_is_not_taken(sent: Output, error: type[DdpctlError], wording: Wording) -> None:
    has = Output(returncode=0, stdout="debug* 3 8 8000 gpu:1\ncpu 9 64 512000 (null)\n")
    with pytest.raises(error) as raised:
        submit(NONE, NONE, OK, sent, has)
    wording(raised.value)


def test_logs_are_the_jobs_or_some_nodes_or_ranks(wording: Wording) -> None:
    def files(query: LogQuery, run: Run = RUN) -> tuple[str, ...]:
        (asked,), _ = play(SlurmTarget(SlurmOptions()).logs(run, query), [(OK,)])
        assert (asked.mode, asked.timeout_s) == ("stream", None)
        assert asked.argv[2] == (queue.FOLLOW if query.follow else queue.PRINT)
        return asked.argv[4:]

    assert files(LogQuery(follow=True)) == ("7", "+1", "", "/r/night/job.log")
    both = ("[node1 rank2] ", "/r/night/node-1/rank-2.log", "[node1 rank3] ", "/r/night/node-1/rank-3.log")
    assert files(LogQuery(nodes=(1,), tail=5)) == ("7", "5", *both), "there is no node.log on Slurm"
    timed = files(LogQuery(ranks=(3,), timestamps=True))
    assert timed == ("7", "+1", "", "/r/night/node-1/timed/rank-3.log", "", "/r/night/node-1/timed/rank-3.1.log")
    every = files(LogQuery(timestamps=True, tail=5))
    assert [path.removeprefix("/r/night/") for path in every[3::2]] == [
        f"node-{node}/timed/{name}.log"
        for node in (0, 1)
        for name in ("ddprun", f"rank-{2 * node}", f"rank-{2 * node + 1}")
    ]
    assert files(LogQuery(ranks=(3,))) == ("7", "+1", "[node1 rank3] ", "/r/night/node-1/rank-3.log")
    array = replace(RUN, handle=RUN.handle | {"tasks": ["4"]})
    with pytest.raises(ConfigError):
        files(LogQuery(timestamps=True), array)
    assert files(LogQuery(), array) == ("7", "+1", "[task 4] ", "/r/night/job-4.log")
    (task,) = SlurmTarget(SlurmOptions()).tasks(array)
    assert files(LogQuery(), task) == ("7_4", "+1", "", "/r/night/job-4.log")
    assert files(LogQuery(ranks=(1,)), task) == ("7_4", "+1", "[node0 rank1] ", "/r/night/task-4/node-0/rank-1.log")
    with pytest.raises(NoInputError) as raised:
        play(SlurmTarget(SlurmOptions()).logs(RUN, LogQuery(ranks=(9,))), [(Output(returncode=66),)])
    wording(raised.value)


def test_a_task_of_an_array_is_a_run_of_its_own() -> None:
    array = replace(RUN, handle=RUN.handle | {"tasks": ["0", "4"], "logs": "hpc:/r/night"})
    assert SlurmTarget(DEFAULTS).tasks(RUN) == ()
    _, task = SlurmTarget(DEFAULTS).tasks(array)
    assert (task.name, task.checkpoint_dir) == ("night.task-4", "/r/night/task-4/checkpoints")
    assert task.job.env == {"SLURM_ARRAY_TASK_ID": "4"}
    assert (task.handle["job"], task.handle["dir"], task.logs_at) == ("7_4", "/r/night/task-4", "hpc:/r/night/task-4")


def test_stop_and_a_command_beside_the_ranks(wording: Wording) -> None:
    target = SlurmTarget(SlurmOptions())
    (asked,), gone = play(target.stop(RUN, signal="TERM"), [(Output(returncode=1),)])
    assert asked.argv[2:] == (queue.STOP, "ddpctl", "7", "TERM", "45", "/r/night")
    assert gone is False
    (asked,), _ = play(target.stop(RUN, signal="INT", wait=False), [(Output(returncode=1),)])
    assert asked.argv[4:] == ("7", "INT", "0", "/r/night")
    (asked,), gone = play(target.stop(RUN, signal="KILL"), [(OK,)])
    assert (asked.argv[5:], gone) == (("KILL", "60", "/r/night"), True)
    (asked,), code = play(target.execute(RUN, node=1, argv=("nvidia-smi",), tty=False), [(Output(returncode=3),)])
    assert (asked.argv[4:], asked.mode, code) == (("7", "1", "/p", "--", "nvidia-smi"), "stream", 3)
    docker = SlurmTarget(SlurmOptions(runtime="docker"))
    (asked,), _ = play(docker.execute(RUN, node=1, argv=(), tty=True), [(OK,)])
    assert asked.argv[4:] == ("7", "1", "/p", "--pty", "--", "docker", "exec", "-it", "ddpctl-7-1", "bash")
    assert asked.mode == "tty"
    with pytest.raises(NoInputError) as raised:
        play(target.execute(RUN, node=2, argv=(), tty=True), [])
    wording(raised.value)


def test_arrays_are_slurms_alone(wording: Wording) -> None:
    for words in (("launch", "--array", "0-3"), ("render", "--target", "slurm", "--array", "0-3;x")):
        done = ddpctl(*words)
        assert done.returncode == 2
        wording(done.stderr)
