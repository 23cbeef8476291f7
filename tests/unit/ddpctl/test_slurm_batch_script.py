"""Slurm's batch script, run by bash against stand-ins (slurm_standins) for Slurm's programs and container runtimes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.slurm_standins import Recorded, StandIns

from ddpctl.launch_plan import Plan
from ddpctl.spec import JobSpec
from ddpctl.targets.slurm.batch_script import directives, render_script
from ddpctl.targets.slurm.options import SlurmOptions
from ddprun.node_config import NodeConfig, read_config
from ddprun.options import parse
from ddpwire import run_files

JOB = JobSpec(name="train", nodes="2", gpus=2, command=("ddptrain", "--lr", "0.1 $(x)"), env={"A": "b c\n$(d)"})
IMAGE = "ghcr.io/ddpctl/ddpctl:0.1.0"
GIVEN = ("--grace", "30", "-m", "ddptrain", "--lr", "0.1 $(x)")
HANDED = (
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", "DDP_RUN_ID", "DDP_RUN_UID",
    "DDP_RUN_DIR", "DDP_CHECKPOINT_DIR", "DDP_SECRET_FILE", "DDP_TARGETS_DIR", "DDP_LAUNCHER", "DDP_DEVICE",
    "DDP_IMAGE", "SLURM_JOB_ID", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT", "SLURM_NNODES", "SLURM_STEP_ID", "SLURM_NODEID",
    "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "DDP_CHECKPOINT_STORE", "DDP_JOB_ENV",
)  # fmt: skip
CARRIED = json.dumps(JOB.env)
RETRY = '{"code": 143, "cause": "stopped", "message": "saved", "retry": true}'


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def contract(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("PET_", "DDP_"))}


def config(call: Recorded) -> NodeConfig:
    """What the real ddprun makes of what it is given."""
    words = call.argv[call.argv.index("--grace") :]
    return read_config(parse(words), call.env, lambda _: 0)


def test_every_node_gets_its_place_and_the_arguments_byte_for_byte(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), PET_NODE_RANK="7", SLURM_NTASKS="9", DDP_LIFELINE_FD="3")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    step = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--export=ALL", "--input=none", "--mpi=none",
            f"--chdir={stand_ins.folder}", "--cpus-per-task=4", "--kill-on-bad-exit=0")  # fmt: skip
    assert done.code == 0, done.said
    assert [fact in done.said for fact in ("4711", "nodes: 2", "10.0.0.1", run_dir)] == [True] * 4
    assert [call.argv[:10] for call in done.of("srun")] == [(*step, "--wait=60"), (*step, "--wait=0")]
    assert "SLURM_NTASKS" not in done.of("srun")[1].env
    nodes = done.of("ddprun")[2:]  # the first two answered whether it is there
    assert [call.argv for call in nodes] == [("-P", "-m", "ddprun", *GIVEN)] * 2
    assert [contract(call.env) for call in nodes] == [
        {
            "PET_NPROC_PER_NODE": "2",
            "PET_MASTER_ADDR": "10.0.0.1",
            "DDP_RUN_ID": "train-4711",
            "DDP_RUN_DIR": run_dir,
            "DDP_CHECKPOINT_DIR": f"{run_dir}/checkpoints",
            "DDP_SECRET_FILE": f"{run_dir}/store.secret",
            "DDP_TARGETS_DIR": f"{stand_ins.folder}/runs/.targets",
            "DDP_LAUNCHER": "slurm",
            "DDP_JOB_ENV": CARRIED,
        }
    ] * 2
    read = [config(call) for call in nodes]
    assert [(one.max_nodes, one.node_rank, one.local_world_size) for one in read] == [(2, 0, 2), (2, 1, 2)]
    assert {(one.master_addr, one.master_port, one.run_id) for one in read} == {("10.0.0.1", 61175, "train-4711")}


def test_what_slurm_knows_is_read_from_slurm(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), SLURM_JOB_NUM_NODES="3", SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID="9072")
    nodes = done.of("ddprun")[3:]
    read = [config(call) for call in nodes]
    assert [(one.max_nodes, one.node_rank, one.local_world_size) for one in read] == [(3, 0, 1), (3, 1, 1), (3, 2, 1)]
    assert {one.master_port for one in read} == {61000}
    assert done.code == 0


def test_elastic_jobs_say_how_few_nodes_are_enough(stand_ins: StandIns) -> None:
    job = replace(JOB, nodes="2:4", device="cpu")
    assert directives(job, SlurmOptions()) == (
        "--job-name=train", "--nodes=2-4", "--ntasks-per-node=1", "--cpus-per-task=2", "--no-kill",
        "--signal=B:USR1@90", "--requeue", "--open-mode=append",
    )  # fmt: skip
    many = stand_ins.run(job, SlurmOptions(), SLURM_JOB_NUM_NODES="3").of("ddprun")
    one = stand_ins.run(job, SlurmOptions(), SLURM_JOB_NUM_NODES="1").of("ddprun")
    assert [many[-1].env["PET_NNODES"], one[-1].env["PET_NNODES"]] == ["2:3", "1:1"]
    read = [config(call) for call in (many[-1], one[-1])]
    assert [(one.min_nodes, one.max_nodes, one.node_rank) for one in read] == [(2, 3, 2), (1, 1, 0)]
    assert many[-1].env["DDP_DEVICE"] == "cpu"


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_gets_names_of_variables_and_a_pipe(stand_ins: StandIns, engine: Any) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",), secrets=("TOKEN",), shm="4Gi")
    options = SlurmOptions(runtime=engine, runtime_args=("--device=/dev/x y",))
    done = stand_ins.run(job, options, TOKEN="hidden", SLURM_CPUS_PER_TASK="")  # noqa: S106
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    user = f"--user {os.getuid()}:{os.getgid()}" if engine == "docker" else "--userns=keep-id"
    names = " ".join(f"--env {name}" for name in (*HANDED, "TOKEN"))
    for node, call in enumerate(call for call in done.of(engine) if call.argv[0] == "run"):
        assert call.argv == (
            "run", "--name", f"ddpctl-4711-{node}", "--rm", "--init", "--interactive", "--network=host", "--label",
            "ddpctl.run=train-4711", "--shm-size=4g", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", *user.split(), "--workdir", "/workspace", "--env", "HOME=/tmp",
            "--env", "DDP_LIFELINE_FD=3", *names.split(), "--volume", f"{stand_ins.folder}:/workspace",
            "--volume", f"{run_dir}:{run_dir}", "--volume", f"{run_dir}/checkpoints:{run_dir}/checkpoints",
            "--volume", f"{targets}:{targets}", "--volume", "/data:/data:ro",
            "--device=/dev/x y", "--entrypoint", "sh", IMAGE,
            "-c", 'exec 3<&0 </dev/null; exec ddprun "$@"', "ddprun", *GIVEN,
        )  # fmt: skip
        inside = {name: call.env[name] for name in (*HANDED, "TOKEN") if name in call.env}
        read = config(replace(call, argv=GIVEN, env=inside))
        assert (read.node_rank, read.max_nodes, read.local_world_size) == (node, 2, 2)
        assert (read.master_addr, read.master_port, read.run_id) == ("10.0.0.1", 61175, "train-4711")
        assert (call.env["TOKEN"], call.env["DDP_JOB_ENV"]) == ("hidden", CARRIED)
    removed = [call.argv for call in done.of(engine) if call.argv[0] == "rm"]
    assert removed == [("rm", "--force", f"ddpctl-4711-{node}") for node in (0, 0, 1, 1)]  # before and after


def test_apptainer_runs_one_cached_image_and_no_variable_stands_in_an_argument(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="apptainer"))
    pull, *nodes = done.of("apptainer")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    sif = f"{stand_ins.folder}/home/.cache/ddpctl/images/ghcr.io_ddpctl_ddpctl_0.1.0.sif"
    assert pull.argv == ("pull", f"{sif}.4711", f"docker://{IMAGE}")
    for call in nodes:
        program, *argv = call.argv
        assert [program, *argv] == [
            "exec", "--cleanenv", "--no-home", "--nv", "--pwd", "/workspace",
            "--bind", f"{stand_ins.folder}:/workspace", "--bind", f"{run_dir}:{run_dir}",
            "--bind", f"{run_dir}/checkpoints:{run_dir}/checkpoints", "--bind", f"{targets}:{targets}",
            "--bind", "/data:/data:ro", sif, "ddprun", *GIVEN,
        ]  # fmt: skip
        for name in ("SLURM_NODEID", "DDP_RUN_DIR", "DDP_JOB_ENV"):
            assert call.env[f"APPTAINERENV_{name}"] == call.env[f"SINGULARITYENV_{name}"] == call.env[name]
    assert len(nodes) == 2
    Path(sif).write_text("an image")  # the stand-in's pull leaves an empty file
    assert len(stand_ins.run(job, SlurmOptions(runtime="apptainer")).of("apptainer")) == 2


def test_pyxis_names_every_variable(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="pyxis"))
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    _, main = done.of("srun")
    assert main.argv[10:-len(GIVEN) - 5] == (
        "--container-image=ghcr.io#ddpctl/ddpctl:0.1.0", "--container-workdir=/workspace",
        f"--container-mounts={stand_ins.folder}:/workspace,{run_dir}:{run_dir},"
        f"{run_dir}/checkpoints:{run_dir}/checkpoints,{targets}:{targets},/data:/data:ro",
        "--no-container-mount-home", "--no-container-entrypoint", f"--container-env={','.join(HANDED)}",
    )  # fmt: skip
    assert (main.argv[-len(GIVEN) - 5 : -len(GIVEN) - 3], main.argv[-len(GIVEN) - 1 :]) == (
        ("sh", "-c"),
        ("ddprun", *GIVEN),
    )
    assert [call.argv for call in done.of("ddprun")] == [GIVEN, GIVEN]


def test_a_secret_that_is_not_set_is_named(stand_ins: StandIns) -> None:
    done = stand_ins.run(replace(JOB, secrets=("TOKEN",)), SlurmOptions())
    outcome = json.loads((stand_ins.folder / "runs/train-4711/node-0/outcome.json").read_text())
    assert (done.code, done.said) == (78, f"slurm: {outcome['message']}\n")
    assert outcome == {"code": 78, "cause": "config", "message": outcome["message"]}
    assert "TOKEN" in outcome["message"]


def test_a_missing_script_is_reported_by_every_node(stand_ins: StandIns) -> None:
    done = stand_ins.run(replace(JOB, command=("no such.py",)), SlurmOptions())
    assert done.code == 66
    assert [f"node-{node}: no such.py" in done.said for node in (0, 1)] == [True, True]


def test_a_folder_that_cannot_be_made_is_named(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), RUN_DIR="/proc/x")
    assert (done.code, done.calls) == (73, ())
    assert "/proc/x" in done.said.splitlines()[-1]


def test_a_run_that_goes_on_from_another_has_its_checkpoints_also_in_an_array(stand_ins: StandIns) -> None:
    folder = stand_ins.folder
    plan = Plan(run="b", job=JOB, cwd=str(folder), run_dir=f"{folder}/b", checkpoint_dir=f"{folder}/a/checkpoints")
    one = stand_ins.run(JOB, SlurmOptions(), plan).of("ddprun")[-1].env
    assert (one["DDP_RUN_DIR"], one["DDP_CHECKPOINT_DIR"]) == (f"{folder}/b", f"{folder}/a/checkpoints")
    assert "DDP_RUN_UID" not in one
    done = stand_ins.run(JOB, SlurmOptions(array="0-3"), replace(plan, uid="0a1b"), SLURM_ARRAY_TASK_ID="3")
    task = done.of("ddprun")[-1].env
    assert task["DDP_RUN_UID"] == "0a1b-3"
    assert (task["DDP_RUN_DIR"], task["DDP_CHECKPOINT_DIR"]) == (f"{folder}/b/task-3", f"{folder}/a/task-3/checkpoints")


@pytest.mark.parametrize(
    ("code", "outcome", "saves", "requeued"),
    [
        ("143", RETRY, "7", True),  # preempted: the ranks were told, and saved
        ("1", '{"code": 1, "cause": "error", "retry": false}', "7", False),  # the script's own failure
        ("137", "", "7", True),  # every ddprun was killed without a word
        ("75", '{"code": 75, "cause": "gave_up", "retry": false}', "", False),
        ("0", '{"code": 0, "cause": "ok", "retry": false}', "7", False),
    ],
    ids=["preempted", "script-failed", "killed", "gave-up", "done"],
)
def test_the_outcome_decides_on_a_requeue(
    stand_ins: StandIns, code: str, outcome: str, saves: str, requeued: bool
) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), CODE=code, OUTCOME=outcome, SAVES=saves)
    assert [call.argv for call in done.of("scontrol")[2:]] == [("requeue", "4711")] * requeued
    assert done.code == int(code)
    assert [line for line in done.said.splitlines() if "requeued" in line and "requeues" not in line] == (
        ["slurm: requeued"] if requeued else []
    )


def test_no_requeue_beyond_the_cap_or_outside_of_a_batch_job(stand_ins: StandIns) -> None:
    env = {"CODE": "143", "OUTCOME": RETRY}
    capped = [stand_ins.run(JOB, SlurmOptions(requeues=2), **env, SLURM_RESTART_COUNT=str(n)) for n in range(3)]
    assert [len(done.of("scontrol")) for done in capped] == [3, 3, 2]
    assert "limit of 2" in capped[2].said.splitlines()[-1]
    inside = stand_ins.run(JOB, SlurmOptions(), **env, ENVIRONMENT="")
    assert (inside.code, len(inside.of("scontrol"))) == (143, 2)


def test_each_start_is_written_down_and_those_of_an_earlier_job_are_not_kept(stand_ins: StandIns) -> None:
    env = {"RUN_DIR": str(stand_ins.folder / "kept")}

    def starts(**more: str) -> list[tuple[str, str, int, int]]:
        began = int(time.time())
        stand_ins.run(JOB, SlurmOptions(requeues=2), **env, **more)
        found = run_files.read_starts((stand_ins.folder / "kept" / "starts").read_text())
        assert began <= found[-1].time <= time.time() or "SLURM_JOB_START_TIME" in more
        return [(one.launcher, one.job, one.requeues, one.limit) for one in found]

    assert starts() == [("slurm", "4711", 0, 2)]
    assert starts(SLURM_RESTART_COUNT="1", SLURM_JOB_START_TIME="900")[1:] == [("slurm", "4711", 1, 2)]
    assert run_files.read_starts((stand_ins.folder / "kept" / "starts").read_text())[1].time == 900
    assert starts(SLURM_JOB_ID="4712") == [("slurm", "4712", 0, 2)]
    assert starts(ENVIRONMENT="")[0][1].startswith("@")


@contextlib.contextmanager
def start(stand_ins: StandIns) -> Iterator["subprocess.Popen[bytes]"]:
    """A job of one node, whose srun or ddprun a test has replaced; what scancel is asked is in the file ``told``."""
    told = stand_ins.folder / "told"
    (stand_ins.folder / "bin" / "scancel").write_text(f'#!/bin/bash\necho "$*" >>{told}\n')
    script = stand_ins.folder / "job.sh"
    script.write_text(render_script(stand_ins.plan(replace(JOB, nodes="1")), SlurmOptions()))
    env = stand_ins.environ | {"SLURM_JOB_NUM_NODES": "1"}
    argv = ["/bin/bash", str(script)]
    with subprocess.Popen(argv, env=env, cwd=stand_ins.folder, stderr=subprocess.PIPE, process_group=0) as job:
        try:
            yield job
        finally:  # a test that fails does not wait for its job
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def was_requeued(stand_ins: StandIns) -> bool:
    calls = [path.read_text().replace("\0", " ") for path in stand_ins.folder.glob("records/*-scontrol.argv")]
    return "requeue 4711 " in calls


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("signals", "times_told", "requeued"),
    [
        pytest.param(["USR1"], 1, True, id="warning"),
        pytest.param(["USR2"], 1, False, id="stop"),
        pytest.param(["TERM"], 1, False, id="scancel"),
        pytest.param(["USR1", "USR2"], 1, False, id="warning-and-stop"),
        pytest.param(["USR2", "USR2"], 2, False, id="two-stops"),  # the second one kills
    ],
)
def test_a_signal_is_handed_on_to_the_step(
    stand_ins: StandIns, signals: list[str], times_told: int, requeued: bool
) -> None:
    told, go, run_dir = stand_ins.folder / "told", stand_ins.folder / "go", stand_ins.folder / "runs/train-4711"
    (stand_ins.folder / "bin" / "ddprun").write_text(
        f'#!/bin/bash\n[[ " $* " != *" -c "* ]] || exit 0\nwhile [[ ! -e {go} ]]; do sleep 0.05; done\nexit 143\n'
    )
    with start(stand_ins) as job:
        assert job.stderr is not None
        until((run_dir / "step").exists)
        lines = [job.stderr.readline()]  # of the start
        for name in signals:
            job.send_signal(getattr(signal, f"SIG{name}"))
            if name != "TERM":
                lines.append(job.stderr.readline())  # it was heard
        until(lambda: told.exists() and len(told.read_text().splitlines()) == times_told)
        go.touch()
        assert job.wait(30) == 143
    assert set(told.read_text().splitlines()) == {"--quiet --signal=TERM 4711.1"}
    assert len(told.read_text().splitlines()) == times_told
    assert was_requeued(stand_ins) == requeued


# It is started in the background of a script, where bash could not trap INT.
INTERRUPTED = """\
#!{python}
import os, pathlib, signal, sys, time
if "-c" in sys.argv:
    sys.exit()
sys.path.insert(0, "{trainer}")
from ddpwire.run_files import NodeState
def told(*_):
    with open("{told}", "a") as file:
        print("ddprun: INT", file=file)
signal.signal(signal.SIGINT, told)
folder = pathlib.Path(os.environ["DDP_RUN_DIR"], "node-" + os.environ["SLURM_NODEID"])
folder.mkdir(exist_ok=True)
NodeState(run="night", node=0, pid=os.getpid(), state="training", started=0.0).write(folder)
while not os.path.exists("{go}"):
    time.sleep(0.05)
sys.exit(130)
"""


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        pytest.param(["INT"], ["ddprun: INT"], id="once"),
        pytest.param(["INT", "INT"], ["ddprun: INT"] * 2, id="twice"),
        pytest.param(["USR1", "INT"], ["--quiet --signal=TERM 4711.1"], id="warning-and-interrupt"),
    ],
)
def test_ctrl_c_is_for_ddprun_alone(stand_ins: StandIns, signals: list[str], said: list[str]) -> None:
    told, go, run_dir = stand_ins.folder / "told", stand_ins.folder / "go", stand_ins.folder / "runs/train-4711"
    trainer = Path(run_files.__file__).parents[1]
    (stand_ins.folder / "bin" / "ddprun").write_text(
        INTERRUPTED.format(python=sys.executable, trainer=trainer, told=told, go=go)
    )
    with start(stand_ins) as job:
        assert job.stderr is not None
        until((run_dir / "node-0" / "node.json").exists)
        job.stderr.readline()  # of the start
        for number, name in enumerate(signals, 1):
            job.send_signal(getattr(signal, f"SIG{name}"))
            job.stderr.readline()  # it was heard
            if number <= len(said):
                until(lambda number=number: told.exists() and len(told.read_text().splitlines()) == number)
        go.touch()
        assert job.wait(30) == 130
    assert told.read_text().splitlines() == said
    assert not was_requeued(stand_ins)


@pytest.mark.parametrize(("name", "requeued"), [("USR1", True), ("USR2", False), ("INT", False)])
def test_a_signal_while_srun_has_no_step_yet(stand_ins: StandIns, name: str, requeued: bool) -> None:
    go, started = stand_ins.folder / "go", stand_ins.folder / "started"
    (stand_ins.folder / "bin" / "srun").write_text(
        f'#!/bin/bash\n[[ " $* " != *" --wait=60 "* ]] || exit 0\ntouch {started}\n'
        f"while [[ ! -e {go} ]]; do sleep 0.05; done\nexit 1\n"
    )
    with start(stand_ins) as job:
        assert job.stderr is not None
        until(started.exists)
        job.send_signal(getattr(signal, f"SIG{name}"))
        while not re.search(rb"asking the ranks to save|the ranks get SIGINT", line := job.stderr.readline()):
            assert line
        go.touch()
        assert job.wait(30) == 1
    assert not (stand_ins.folder / "told").exists()
    assert was_requeued(stand_ins) == requeued
