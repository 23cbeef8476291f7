"""Slurm's batch script, run by bash against stand-ins (slurm_standins) for Slurm's programs and container runtimes."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ddpctl.slurm_standins import StandIns

from ddpctl.plan import Plan
from ddpctl.spec import JobSpec
from ddpctl.targets.slurm import SlurmOptions
from ddpctl.targets.slurm.directives import directives
from ddpctl.targets.slurm.script import render_script

JOB = JobSpec(name="train", nodes="2", gpus=2, command=("ddptrain", "--lr", "0.1 $(x)"), env={"A": "b c\n$(d)"})
IMAGE = "ghcr.io/ddpctl/ddpctl:0.1.0"
GIVEN = ("--run-id", "train-4711", "--grace", "30", "-m", "ddptrain", "--lr", "0.1 $(x)")
HANDED = (
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "DDP_RUN_DIR",
    "DDP_CHECKPOINT_DIR", "DDP_DEVICE", "DDP_IMAGE", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES", "A",
)  # fmt: skip
RETRY = '{"code": 143, "cause": "stopped", "message": "saved", "retry": true}'


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def contract(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("PET_", "DDP_")) or name == "A"}


def test_every_node_gets_its_place_and_the_arguments_byte_for_byte(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), PET_NODE_RANK="7", SLURM_NTASKS="9", DDP_LIFELINE_FD="3")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    step = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--export=ALL", "--input=none", "--mpi=none",
            f"--chdir={stand_ins.folder}", "--cpus-per-task=4", "--kill-on-bad-exit=0")  # fmt: skip
    assert done.code == 0, done.said
    assert done.said == f"slurm: job 4711, start 1, nodes: 2, from 10.0.0.1:61175, files in {run_dir}\n"
    assert [call.argv[:10] for call in done.of("srun")] == [(*step, "--wait=60"), (*step, "--wait=0")]
    assert "SLURM_NTASKS" not in done.of("srun")[1].env
    nodes = done.of("ddprun")[2:]  # the first two answered whether it is there
    assert [call.argv for call in nodes] == [("-P", "-m", "ddprun", *GIVEN)] * 2
    assert [contract(call.env) for call in nodes] == [
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "10.0.0.1",
            "PET_MASTER_PORT": "61175",
            "DDP_RUN_DIR": run_dir,
            "DDP_CHECKPOINT_DIR": f"{run_dir}/checkpoints",
            "A": "b c\n$(d)",
        }
        for node in (0, 1)
    ]


def test_what_slurm_knows_is_read_from_slurm(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), SLURM_JOB_NUM_NODES="3", SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID="9072")
    nodes = done.of("ddprun")[3:]
    places = [(call.env["PET_NNODES"], call.env["PET_NODE_RANK"], call.env["PET_NPROC_PER_NODE"]) for call in nodes]
    assert places == [("3", "0", "1"), ("3", "1", "1"), ("3", "2", "1")]
    assert nodes[0].env["PET_MASTER_PORT"] == "61000"
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
    assert many[-1].env["DDP_DEVICE"] == "cpu"


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_gets_names_of_variables_and_a_pipe(stand_ins: StandIns, engine: Any) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",), secrets=("TOKEN",), shm="4Gi")
    options = SlurmOptions(runtime=engine, runtime_args=("--device=/dev/x y",))
    done = stand_ins.run(job, options, TOKEN="hidden", SLURM_CPUS_PER_TASK="")  # noqa: S106
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    user = f"--user {os.getuid()}:{os.getgid()}" if engine == "docker" else "--userns=keep-id"
    names = " ".join(f"--env {name}" for name in (*HANDED, "TOKEN"))
    for node, call in enumerate(call for call in done.of(engine) if call.argv[0] == "run"):
        assert call.argv == (
            "run", "--name", f"ddpctl-4711-{node}", "--rm", "--init", "--interactive", "--network=host", "--label",
            "ddpctl.run=train", "--shm-size=4g", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", *user.split(), "--workdir", "/workspace", "--env", "HOME=/tmp",
            "--env", "DDP_LIFELINE_FD=3", *names.split(), "--volume", f"{stand_ins.folder}:/workspace",
            "--volume", f"{run_dir}:{run_dir}", "--volume", f"{run_dir}/checkpoints:{run_dir}/checkpoints",
            "--volume", "/data:/data:ro", "--device=/dev/x y", "--entrypoint", "sh", IMAGE,
            "-c", 'exec 3<&0 </dev/null; exec ddprun "$@"', "ddprun", *GIVEN,
        )  # fmt: skip
        assert contract(call.env)["PET_NODE_RANK"] == str(node)
        assert (call.env["TOKEN"], call.env["A"]) == ("hidden", "b c\n$(d)")
    removed = [call.argv for call in done.of(engine) if call.argv[0] == "rm"]
    assert removed == [("rm", "--force", f"ddpctl-4711-{node}") for node in (0, 0, 1, 1)]  # before and after


def test_apptainer_runs_one_cached_image_and_no_variable_stands_in_an_argument(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="apptainer"))
    pull, *nodes = done.of("apptainer")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    sif = f"{stand_ins.folder}/home/.cache/ddpctl/images/ghcr.io_ddpctl_ddpctl_0.1.0.sif"
    assert pull.argv == ("pull", f"{sif}.4711", f"docker://{IMAGE}")
    for call in nodes:
        program, *argv = call.argv
        assert [program, *argv] == [
            "exec", "--cleanenv", "--no-home", "--nv", "--pwd", "/workspace",
            "--bind", f"{stand_ins.folder}:/workspace", "--bind", f"{run_dir}:{run_dir}",
            "--bind", f"{run_dir}/checkpoints:{run_dir}/checkpoints", "--bind", "/data:/data:ro", sif, "ddprun", *GIVEN,
        ]  # fmt: skip
        for name in ("PET_NODE_RANK", "DDP_RUN_DIR", "A"):
            assert call.env[f"APPTAINERENV_{name}"] == call.env[f"SINGULARITYENV_{name}"] == call.env[name]
    assert len(nodes) == 2
    Path(sif).write_text("an image")  # the stand-in's pull leaves an empty file
    assert len(stand_ins.run(job, SlurmOptions(runtime="apptainer")).of("apptainer")) == 2


def test_pyxis_names_every_variable(stand_ins: StandIns) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",))
    done = stand_ins.run(job, SlurmOptions(runtime="pyxis"))
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    _, main = done.of("srun")
    assert main.argv[10:-len(GIVEN) - 5] == (
        "--container-image=ghcr.io#ddpctl/ddpctl:0.1.0", "--container-workdir=/workspace",
        f"--container-mounts={stand_ins.folder}:/workspace,{run_dir}:{run_dir},"
        f"{run_dir}/checkpoints:{run_dir}/checkpoints,/data:/data:ro",
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
    assert (done.code, done.said) == (78, "slurm: the secret TOKEN is not set: export it before sbatch\n")
    assert outcome == {"code": 78, "cause": "config", "message": "the secret TOKEN is not set: export it before sbatch"}


def test_what_a_node_lacks_is_said_with_its_name(stand_ins: StandIns) -> None:
    done = stand_ins.run(replace(JOB, command=("no such.py",)), SlurmOptions())
    assert done.code == 66
    assert done.said == (
        f"node-0: no such.py: there is no such script in {stand_ins.folder}\n"
        f"node-1: no such.py: there is no such script in {stand_ins.folder}\n"
        "slurm: not every node can run this: see the lines before this one\n"
    )


def test_a_folder_that_cannot_be_made(stand_ins: StandIns) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), RUN_DIR="/proc/x")
    assert (done.code, done.calls) == (73, ())
    assert done.said.splitlines()[1] == "slurm: cannot write /proc/x"


def test_a_run_that_goes_on_from_another_has_its_checkpoints_also_in_an_array(stand_ins: StandIns) -> None:
    folder = stand_ins.folder
    plan = Plan(run="b", job=JOB, cwd=str(folder), run_dir=f"{folder}/b", checkpoint_dir=f"{folder}/a/checkpoints")
    one = stand_ins.run(JOB, SlurmOptions(), plan).of("ddprun")[-1].env
    task = stand_ins.run(JOB, SlurmOptions(array="0-3"), plan, SLURM_ARRAY_TASK_ID="3").of("ddprun")[-1].env
    assert (one["DDP_RUN_DIR"], one["DDP_CHECKPOINT_DIR"]) == (f"{folder}/b", f"{folder}/a/checkpoints")
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
)
def test_the_outcome_decides_on_a_requeue(
    stand_ins: StandIns, code: str, outcome: str, saves: str, requeued: bool
) -> None:
    done = stand_ins.run(JOB, SlurmOptions(), CODE=code, OUTCOME=outcome, SAVES=saves)
    assert [call.argv for call in done.of("scontrol")[2:]] == [("requeue", "4711")] * requeued
    assert done.code == int(code)
    said = done.said.splitlines()[1:]
    assert said == [f"slurm: requeued: the run goes on from step-{saves}.pt"] * requeued


def test_no_requeue_without_progress_or_beyond_the_cap_or_outside_of_a_batch_job(stand_ins: StandIns) -> None:
    env = {"CODE": "143", "OUTCOME": RETRY}
    codes = [stand_ins.run(JOB, SlurmOptions(), **env).code for _ in range(2)]
    third = stand_ins.run(JOB, SlurmOptions(), **env)
    assert (*codes, third.code) == (143, 143, 75)
    assert third.said.splitlines()[-1] == "slurm: not requeued: 3 starts in a row left no new checkpoint"
    capped = [stand_ins.run(JOB, SlurmOptions(requeues=2), **env, SLURM_JOB_ID="2", SAVES=str(n)) for n in range(3)]
    assert [len(done.of("scontrol")) for done in capped] == [3, 3, 2]
    assert capped[2].said.splitlines()[-1] == "slurm: not requeued: 2 requeues are all that this run may have"
    inside = stand_ins.run(JOB, SlurmOptions(), **env, SLURM_JOB_ID="3", SAVES="1", ENVIRONMENT="")
    assert (inside.code, len(inside.of("scontrol"))) == (143, 2)


@pytest.mark.parametrize(("name", "requeued"), [("USR1", True), ("USR2", False), ("TERM", False)])
def test_a_signal_is_handed_on_to_the_step(stand_ins: StandIns, name: str, requeued: bool) -> None:
    told = stand_ins.folder / "told"
    (stand_ins.folder / "bin" / "scancel").write_text(f'#!/bin/bash\necho "$*" >>{told}\n')
    waits = '#!/bin/bash\n[[ " $* " != *" -c "* ]] || exit 0\ntouch $DDP_CHECKPOINT_DIR/1.pt\n'
    waits += f"while [[ ! -e {told} ]]; do sleep 0.05; done\nexit 143\n"
    (stand_ins.folder / "bin" / "ddprun").write_text(waits)
    script = stand_ins.folder / "job.sh"
    script.write_text(render_script(stand_ins.plan(replace(JOB, nodes="1")), SlurmOptions()))
    env = stand_ins.environ | {"SLURM_JOB_NUM_NODES": "1"}
    with subprocess.Popen(["/bin/bash", str(script)], env=env, cwd=stand_ins.folder, stderr=subprocess.PIPE) as job:
        deadline = time.monotonic() + 30
        while not (stand_ins.folder / "runs/train-4711/step").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(getattr(signal, f"SIG{name}"))
        assert job.wait(30) == 143
    assert told.read_text() == "--quiet --signal=TERM 4711.1\n"
    attempts = (stand_ins.folder / "runs/train-4711/attempts").read_text().splitlines()
    assert len(attempts) == 1 + requeued
