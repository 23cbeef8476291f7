"""Slurm's batch script, run by bash against stand-ins (slurm_standins) for Slurm's programs and container runtimes."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.slurm_standins import SYSTEM, StandIns
from tests.unit.ddpctl.test_slurm_batch_script import GIVEN, IMAGE, JOB, config, start, wait_for_go, was_requeued

from ddpctl.job.launch_plan import Plan
from ddpctl.targets.slurm.batch_script import directives, render_script
from ddpctl.targets.slurm.options import SlurmOptions
from ddpwire import run_files
from ddpwire.exits import Exit


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def test_apptainer_runs_one_cached_image_and_no_variable_stands_in_an_argument(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="apptainer"))
    pull, *nodes = done.of("apptainer")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    sif = f"{stand_ins.folder}/home/.cache/ddpctl/images/ghcr.io_ddpctl_ddpctl_0.1.0.sif"
    assert pull.argv == ("pull", "--force", f"{sif}.4711", f"docker://{IMAGE}")
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


def test_pyxis_names_the_variables_that_override_the_images(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="pyxis"), NCCL_IB_HCA="mlx5")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    (main,) = done.of("srun")
    *container, program = main.argv[9 : -len(GIVEN)]
    (variables,) = [word for word in container if word.startswith("--container-env=")]
    container.remove(variables)
    assert container == [
        "--container-image=ghcr.io#ddpctl/ddpctl:0.1.0", "--container-workdir=/workspace",
        f"--container-mounts={stand_ins.folder}:/workspace,{run_dir}:{run_dir},"
        f"{run_dir}/checkpoints:{run_dir}/checkpoints,{targets}:{targets},/data:/data:ro",
        "--no-container-mount-home", "--no-container-entrypoint",
    ]  # fmt: skip
    assert program == "ddprun"
    named = set(variables.removeprefix("--container-env=").split(","))
    assert {"DDP_RUN_DIR", "DDP_JOB_ENV", "PET_MASTER_ADDR", "SLURM_JOB_ID", "NCCL_IB_HCA"} <= named
    assert [call.argv for call in done.of("ddprun")] == [GIVEN, GIVEN]


def test_a_folder_that_cannot_be_made_is_named(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), RUN_DIR="/proc/x")
    assert (done.code, done.of("srun")) == (73, ())
    assert "/proc/x" in done.output.splitlines()[-1]


def test_a_run_that_goes_on_from_another_has_its_checkpoints_also_in_an_array(stand_ins: StandIns) -> None:
    folder = stand_ins.folder
    plan = Plan(name="b", job=JOB, cwd=str(folder), folder=f"{folder}/b", checkpoint_dir=f"{folder}/a/checkpoints")
    call = stand_ins.run(JOB, SlurmOptions(), plan).of("ddprun")[-1].env
    assert (call["DDP_RUN_DIR"], call["DDP_CHECKPOINT_DIR"]) == (f"{folder}/b", f"{folder}/a/checkpoints")
    assert "DDP_RUN_UID" not in call
    done = stand_ins.run(JOB, SlurmOptions(array="0-3"), replace(plan, uid="0a1b"), SLURM_ARRAY_TASK_ID="3")
    task = done.of("ddprun")[-1].env
    assert task["DDP_RUN_UID"] == "0a1b-3"
    assert (task["DDP_RUN_DIR"], task["DDP_CHECKPOINT_DIR"]) == (f"{folder}/b/task-3", f"{folder}/a/task-3/checkpoints")


def test_each_start_is_written_down_and_those_of_an_earlier_job_are_not_kept(stand_ins: StandIns) -> None:
    env = {"RUN_DIR": str(stand_ins.folder / "kept")}

    def starts(**more: str) -> list[tuple[str, str, int, int]]:
        began = int(time.time())
        stand_ins.run(JOB, SlurmOptions(requeues=2), **env, **more)
        recorded = run_files.read_starts((stand_ins.folder / "kept" / "starts").read_text())
        assert began <= recorded[-1].time <= time.time() or "SLURM_JOB_START_TIME" in more
        return [(entry.launcher, entry.job, entry.requeues, entry.limit) for entry in recorded]

    assert starts() == [("slurm", "4711", 0, 2)]
    assert starts(SLURM_RESTART_COUNT="1", SLURM_JOB_START_TIME="900")[1:] == [("slurm", "4711", 1, 2)]
    assert run_files.read_starts((stand_ins.folder / "kept" / "starts").read_text())[1].time == 900
    assert starts(SLURM_JOB_ID="4712") == [("slurm", "4712", 0, 2)]
    assert starts(ENVIRONMENT="")[0][1].startswith("@")


# It is started in the background of a script, where bash could not trap INT.
INTERRUPTED = """\
#!{python}
import os, pathlib, signal, sys, time
sys.path.insert(0, "{trainer}")
if "ddprun.batch" in sys.argv or "ddprun.nodectl" in sys.argv:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
from ddpwire import locks
from ddpwire.run_files import LOCK, NodeState
def told(*_):
    with open("{told}", "a") as file:
        print("ddprun: INT", file=file)
signal.signal(signal.SIGINT, told)
folder = pathlib.Path(os.environ["DDP_RUN_DIR"], "node-" + os.environ["SLURM_NODEID"])
folder.mkdir(exist_ok=True)
lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
locks.lock(lock, folder / LOCK, wait_s=3)
(folder.parent / "step").write_text("1")
NodeState(run="night", node=0, pid=os.getpid(), state="training", started=0.0).write(folder)
while not os.path.exists("{go}"):
    time.sleep(0.05)
sys.exit(130)
"""


@pytest.mark.parametrize(
    ("signals", "output"),
    [
        pytest.param(["INT"], ["ddprun: INT"], id="once"),
        pytest.param(["INT", "INT"], ["ddprun: INT"] * 2, id="twice"),
        pytest.param(["USR1", "INT"], ["--quiet --signal=TERM 4711.1"], id="warning-and-interrupt"),
    ],
)
def test_ctrl_c_is_for_ddprun_alone(stand_ins: StandIns, signals: list[str], output: list[str]) -> None:
    signalled, go, run_dir = stand_ins.folder / "told", stand_ins.folder / "go", stand_ins.folder / "runs/train-4711"
    trainer = Path(run_files.__file__).parents[1]
    (stand_ins.folder / "bin" / "ddprun").write_text(
        INTERRUPTED.format(python=sys.executable, trainer=trainer, told=signalled, go=go)
    )
    with start(stand_ins, SlurmOptions()) as job:
        assert job.stderr is not None
        until((run_dir / "node-0" / "node.json").exists)
        job.stderr.readline()  # of the start
        for number, name in enumerate(signals, 1):
            job.send_signal(getattr(signal, f"SIG{name}"))
            job.stderr.readline()  # it was heard
            if number <= len(output):
                until(lambda number=number: signalled.exists() and len(signalled.read_text().splitlines()) == number)
        go.touch()
        assert job.wait(30) == 130
    assert signalled.read_text().splitlines() == output
    assert not was_requeued(stand_ins)


@pytest.mark.parametrize(("name", "requeued"), [("USR1", True), ("USR2", False), ("INT", False)])
def test_a_signal_while_srun_has_no_step_yet(stand_ins: StandIns, name: str, requeued: bool) -> None:
    go, started = stand_ins.folder / "go", stand_ins.folder / "started"
    (stand_ins.folder / "bin" / "srun").write_text(
        f'#!/bin/bash\n[[ " $* " != *" --wait=60 "* ]] || exit 0\ntouch {started}\n'
        f"while [[ ! -e {go} ]]; do sleep 0.05; done\nexit 1\n"
    )
    with start(stand_ins, SlurmOptions()) as job:
        assert job.stderr is not None
        until(started.exists)
        job.stderr.readline()  # of the start
        job.send_signal(getattr(signal, f"SIG{name}"))
        assert job.stderr.readline()  # it was heard
        go.touch()
        assert job.wait(30) == 1
    assert not (stand_ins.folder / "told").exists()
    assert was_requeued(stand_ins) == requeued


def end_of_srun(folder: Path, number: int) -> int:
    """Run how a script waits for its srun, which ends with 7 while SIGTERM arrives. Return the script's exit code."""
    script = render_script(StandIns(folder / str(number)).plan(JOB), SlurmOptions(runtime="pyxis"))
    lines = script.splitlines()
    (first,) = [at for at, line in enumerate(lines) if line.startswith("while kill -0 $! ") and "scancel" not in line]
    go = folder / f"go-{number}"
    srun = f"trap '' TERM; while [[ ! -e {go} ]]; do sleep 0.01; done; exit 7"
    text = "\n".join(("set -euo pipefail", "trap : TERM", f"({srun}) &", "echo", *lines[first : first + 2]))
    argv = ["/bin/bash", "-c", f'{text}\nexit "$_ddp_code"']
    with subprocess.Popen(argv, env={"PATH": SYSTEM}, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        job.send_signal(signal.SIGTERM)
        go.touch()
        return job.wait(60)


def test_a_signal_while_srun_ends_does_not_hide_its_exit_code(tmp_path: Path) -> None:
    """bash 5.2 reports 255 in about one of 15 tries if a signal interrupts its wait while the process ends."""
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(partial(end_of_srun, tmp_path), range(150))} == {7}


def test_an_allocation_has_as_many_ranks_as_its_nodes_have_gpus(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), ENVIRONMENT="", SLURM_GPUS_ON_NODE="", SLURM_GPUS_PER_NODE="a100:4")
    assert done.of("ddprun")[-1].env["PET_NPROC_PER_NODE"] == "4"


def test_a_name_with_special_characters_is_no_path_and_no_list_of_mounts(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), SLURM_JOB_NAME="a/b:c,d")
    assert done.of("ddprun")[-1].env["DDP_RUN_DIR"] == f"{stand_ins.folder}/runs/a_b_c_d-4711"


def test_elastic_jobs_say_how_few_nodes_are_enough(stand_ins: StandIns) -> None:
    job = replace(JOB, nodes="2:4", device="cpu")
    assert directives(job, SlurmOptions()) == (
        "--job-name=train", "--nodes=2-4", "--ntasks-per-node=1", "--cpus-per-task=2", "--no-kill",
        "--signal=B:USR1@90", "--requeue", "--open-mode=append",
    )  # fmt: skip
    many = stand_ins.run(job, SlurmOptions(), SLURM_JOB_NUM_NODES="3").of("ddprun")
    single = stand_ins.run(job, SlurmOptions(), SLURM_JOB_NUM_NODES="1").of("ddprun")
    assert [many[-1].env["PET_NNODES"], single[-1].env["PET_NNODES"]] == ["2:3", "1:1"]
    read = [config(call) for call in (many[-1], single[-1])]
    assert [(node_config.min_nodes, node_config.max_nodes, node_config.node_rank) for node_config in read] == [
        (2, 3, 2),
        (1, 1, 0),
    ]
    assert many[-1].env["DDP_DEVICE"] == "cpu"


@pytest.mark.parametrize("code", [0, 1, 75, 130, 137, 139, 140, 142, 143, 144])
def test_a_containers_exit_code_decides_on_a_requeue(stand_ins: StandIns, code: int) -> None:
    done = stand_ins.run(JOB, SlurmOptions(runtime="pyxis"), CODE=str(code))
    requeued = code in {exit_code for exit_code in Exit if exit_code.retry}
    assert done.code == code
    assert [call.argv for call in done.of("scontrol")[3:]] == [("requeue", "4711")] * requeued
    assert ("slurm: requeued\n" in done.output) == requeued
    capped = stand_ins.run(JOB, SlurmOptions(runtime="pyxis", requeues=1), CODE=str(code), SLURM_RESTART_COUNT="1")
    inside = stand_ins.run(JOB, SlurmOptions(runtime="pyxis"), CODE=str(code), ENVIRONMENT="")
    assert [len(done.of("scontrol")) for done in (capped, inside)] == [3, 3]


@pytest.mark.parametrize("step", [None, ""], ids=["no-file", "empty-file"])
def test_a_warning_before_the_container_has_a_step_waits_for_the_step(stand_ins: StandIns, step: str | None) -> None:
    folder, run_dir = stand_ins.folder, stand_ins.folder / "runs/train-4711"
    wait = f"touch {folder}/started\nwhile [[ ! -e {folder}/go ]]; do /bin/sleep 0.05; done\nexit 143\n"
    (folder / "bin" / "ddprun").write_text(f"#!/bin/bash\n{wait}")
    (folder / "bin" / "sleep").write_text(f"#!/bin/bash\ntouch {folder}/waits\n/bin/sleep 0.05\n")
    (folder / "bin" / "sleep").chmod(0o755)
    with start(stand_ins, SlurmOptions(runtime="pyxis")) as job:
        until((folder / "started").exists)
        if step is not None:
            (run_dir / "step").write_text(step)
        job.send_signal(signal.SIGUSR1)
        until(lambda: (folder / "waits").exists() or (folder / "told").exists() or job.poll() is not None)
        (run_dir / "step").write_text("1")
        until(lambda: (folder / "told").exists() or job.poll() is not None)
        (folder / "go").touch()
        assert job.wait(30) == 143
    assert (folder / "told").read_text().splitlines() == ["--signal=TERM 4711.1"]
    assert was_requeued(stand_ins)


@pytest.mark.parametrize(
    ("name", "num_signals", "requeued"), [("USR1", 1, True), ("USR2", 1, False), ("INT", 1, False), ("TERM", 0, False)]
)
def test_a_container_gets_sigterm_through_the_step(
    stand_ins: StandIns, name: str, num_signals: int, requeued: bool
) -> None:
    signalled, go, run_dir = stand_ins.folder / "told", stand_ins.folder / "go", stand_ins.folder / "runs/train-4711"
    wait_for_go(stand_ins, go)
    with start(stand_ins, SlurmOptions(runtime="pyxis")) as job:
        until((run_dir / "step").exists)
        job.send_signal(getattr(signal, f"SIG{name}"))
        until(lambda: not num_signals or signalled.exists())
        go.touch()
        assert job.wait(30) == 143
    assert (signalled.read_text().splitlines() if num_signals else []) == ["--signal=TERM 4711.1"] * num_signals
    assert was_requeued(stand_ins) == requeued
