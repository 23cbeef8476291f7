"""Slurm's batch script, run by bash against stand-ins (slurm_standins), and what options make of it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.slurm_standins import Recorded, StandIns

from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.batch_script import directives, render_script
from ddpctl.targets.slurm.options import Runtime, SlurmOptions, check_extra
from ddprun.settings.node_config import NodeConfig, read_config
from ddprun.settings.options import parse
from ddpwire.run_files import read_starts

JOB = JobSpec(name="train", nodes="2", gpus=2, command=("ddptrain", "--lr", "0.1 $(x)"), env={"A": "b c\n$(d)"})
IMAGE = "ghcr.io/ddpctl/ddpctl:0.1.0"
GIVEN = ("--grace", "30", "-m", "ddptrain", "--lr", "0.1 $(x)")
CARRIED = json.dumps(JOB.env)
RETRY = '{"code": 143, "cause": "stopped", "message": "saved", "retry": true}'


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def contract(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("PET_", "DDP_"))}


def config(call: Recorded) -> NodeConfig:
    """What the real ddprun makes of what it is given."""
    arguments = call.argv[call.argv.index("--grace") :]
    return read_config(parse(arguments), call.env, lambda _: 0)


@pytest.mark.parametrize("runtime", ["none", "docker"])
def test_extra_options_whose_variables_are_unset_are_repeated_on_srun(runtime: Runtime, stand_ins: StandIns) -> None:
    own = ("--hint=nomultithread", "--gpu-bind=none")
    done = stand_ins.run(
        JOB, SlurmOptions(runtime=runtime, extra=(*own, "--mail-type=END")), SLURM_HINT="compute_bound"
    )
    step = done.of("srun")[-1]
    assert ({*own} <= {*step.argv}, "--mail-type=END" in step.argv, "SLURM_HINT" in step.env) == (True, False, False)


@pytest.mark.parametrize("given", [{}, {"RUN_DIR": "mine"}], ids=["default", "RUN_DIR"])
def test_the_runs_of_the_target_hold_the_run_unless_it_has_a_folder(given: dict[str, str], stand_ins: StandIns) -> None:
    runs = stand_ins.folder / "it's} $HOME"
    done = stand_ins.run(JOB, SlurmOptions(runs=str(runs)), **given)
    assert done.code == 0, done.output
    folder = stand_ins.folder / "mine" if given else runs / "train-4711"
    assert {call.env["DDP_RUN_DIR"] for call in done.of("ddprun")} == {str(folder)}


def test_every_node_gets_its_place_and_the_arguments_byte_for_byte(stand_ins: StandIns) -> None:
    job = replace(JOB, time_limit="4h")  # which begins when the job starts
    done = stand_ins.run(job, SlurmOptions(), PET_NODE_RANK="7", SLURM_NTASKS="9", DDP_LIFELINE_FD="3")
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    step = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--export=ALL", "--input=none", "--cpus-per-task=4",
            "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")  # fmt: skip
    assert done.code == 0, done.output
    assert [fact in done.output for fact in ("4711", "node-[0-1]", "10.0.0.1", run_dir)] == [True] * 4
    assert [call.argv[:9] for call in done.of("srun")] == [step, step]
    assert done.of("srun")[0].argv[9] == "--wait=60"
    assert "SLURM_NTASKS" not in done.of("srun")[1].env
    _, *nodes = done.of("ddprun")  # the first is ddprun.batch
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
    assert [(node_config.max_nodes, node_config.node_rank, node_config.local_world_size) for node_config in read] == [
        (2, 0, 2),
        (2, 1, 2),
    ]
    assert {(node_config.master_addr, node_config.master_port, node_config.run_id) for node_config in read} == {
        ("10.0.0.1", 61175, "train-4711")
    }


def test_what_slurm_knows_is_read_from_slurm_and_a_module_may_fail(stand_ins: StandIns) -> None:
    env = {"BASH_FUNC_module%%": '() { echo "$* $UNSET"; false; }', "SLURM_JOB_NUM_NODES": "3"}
    options = SlurmOptions(modules=("cuda/12.4",))
    done = stand_ins.run(JOB, options, SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID="9072", **env)
    _, *nodes = done.of("ddprun")
    read = [config(call) for call in nodes]
    assert [(node.max_nodes, node.node_rank, node.local_world_size) for node in read] == [
        (3, 0, 1),
        (3, 1, 1),
        (3, 2, 1),
    ]
    assert {node.master_port for node in read} == {61000}
    assert done.code == 0


def test_variables_of_the_job_that_submitted_this_one_are_not_used(stand_ins: StandIns) -> None:
    of_array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}
    others = {"SLURM_RESTART_COUNT": "5", "SLURM_THREADS_PER_CORE": "1", "SLURM_STDOUTMODE": "/dev/null"}
    runs = stand_ins.folder / "runs"
    env = stand_ins.run(JOB, SlurmOptions(), ARRAY="", RESTARTS="0", **of_array, **others).of("ddprun")[-1].env
    assert not env.keys() & {*of_array, *others}
    assert env["DDP_RUN_DIR"] == str(runs / "train-4711")
    assert [(start.job, start.requeues) for start in read_starts((runs / "train-4711/starts").read_text())] == [
        ("4711", 0)
    ]
    task = stand_ins.run(JOB, SlurmOptions(), **of_array).of("ddprun")[-1].env
    assert (task["DDP_RUN_DIR"], task["SLURM_ARRAY_TASK_ID"]) == (str(runs / "train-4700/task-3"), "3")


def test_a_script_outside_of_a_job_a_secret_that_is_not_set_and_a_folder_that_cannot_be_made_are_refused(
    stand_ins: StandIns,
) -> None:
    outside = stand_ins.run(JOB, SlurmOptions(), SLURM_JOB_ID="")
    assert (outside.code, outside.of("srun"), "SLURM_JOB_ID" in outside.output) == (69, (), True)
    unset = stand_ins.run(replace(JOB, secrets=("TOKEN",)), SlurmOptions())
    assert (unset.code, unset.of("srun"), "TOKEN" in unset.output) == (78, (), True)
    (stand_ins.folder / "runs/train-4711").mkdir(parents=True, exist_ok=True)
    for folder in ("runs", "runs/train-4711"):
        shutil.rmtree(stand_ins.folder / folder / ".targets", ignore_errors=True)
        (stand_ins.folder / folder / ".targets").touch()
    full = stand_ins.run(JOB, SlurmOptions())
    assert (full.code, full.of("srun")) == (73, ())


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_gets_names_of_variables_and_a_pipe(stand_ins: StandIns, engine: Any) -> None:
    job = replace(JOB, mounts=("/data:/data:ro",), secrets=("TOKEN",), shm="4Gi", device="cpu", time_limit="4h")
    options = SlurmOptions(runtime=engine, runtime_args=("--device=/dev/x y",))
    site = {"NCCL_IB_HCA": "mlx5", "UCX_TLS": "rc", "LD_PRELOAD": ""}
    env = {"TOKEN": "hidden", "MEMORY": "MinMemoryCPU=512M", "SLURM_MEM_PER_NODE": "9", "SLURM_CPUS_ON_NODE": "4"}
    done = stand_ins.run(job, options, **env, **site)
    run_dir = f"{stand_ins.folder}/runs/train-4711"
    targets = f"{stand_ins.folder}/runs/.targets"
    share = (f"--user={os.getuid()}:{os.getgid()}", "--cpus=4", "--memory=2048M")
    share = share if engine == "docker" else ("--userns=keep-id",)
    for node, call in enumerate(call for call in done.of(engine) if call.argv[0] == "run"):
        argv = [word for word in call.argv if not word.startswith("--env-file=")]
        assert argv == [
            "run", f"--name=ddpctl-4711-{node}", "--rm", "--init", "--interactive", "--network=host",
            "--label=ddpctl.run=train-4711", "--shm-size=4g", "--cap-drop=ALL", "--security-opt=no-new-privileges",
            "--workdir=/workspace", *share, "--env=HOME=/tmp", "--env=DDP_LIFELINE_FD=3",
            f"--volume={stand_ins.folder}:/workspace", f"--volume={run_dir}:{run_dir}",
            f"--volume={run_dir}/checkpoints:{run_dir}/checkpoints", f"--volume={targets}:{targets}",
            "--volume=/data:/data:ro", "--device=/dev/x y", "--entrypoint=sh", IMAGE,
            "-c", 'exec 3<&0 </dev/null; exec ddprun "$@"', "ddprun", *GIVEN,
        ]  # fmt: skip
        inside = {name: value for name, value in call.env.items() if name in call.passed}
        assert {"NCCL_IB_HCA", "UCX_TLS", "DDP_IMAGE", "SLURM_NODEID"} <= inside.keys()
        assert not {"LD_PRELOAD", "PATH", "HOME", "CUDA_VISIBLE_DEVICES"} & inside.keys()
        read = config(replace(call, argv=GIVEN, env=inside))
        assert (read.node_rank, read.max_nodes, read.local_world_size) == (node, 2, 2)
        assert (read.master_addr, read.master_port, read.run_id) == ("10.0.0.1", 61175, "train-4711")
        assert (inside["TOKEN"], inside["DDP_JOB_ENV"]) == ("hidden", CARRIED)
    removed = [call.argv for call in done.of(engine) if call.argv[0] == "rm"]
    assert removed == [("rm", "--force", f"ddpctl-4711-{node}") for node in (0, 1)]
    text = render_script(stand_ins.plan(JOB), options)
    assert "--device=/dev/infiniband --ulimit=memlock=-1" in text
    assert "trap '' TERM && exec tail" in text, "only the end of its task closes the pipe"


def test_secrets_that_others_can_read_are_not_read(stand_ins: StandIns) -> None:
    run_dir = stand_ins.folder / "runs" / "train-4711"
    run_dir.mkdir(parents=True)
    secrets = run_dir / "secrets"
    job = replace(JOB, secrets=("TOKEN",))
    secrets.write_text("export TOKEN=hidden\n")
    secrets.chmod(0o644)
    done = stand_ins.run(job, SlurmOptions())
    assert (done.code, f"{run_dir}/secrets" in done.output) == (78, True)
    assert not secrets.exists()
    secrets.write_text("export TOKEN=hidden\n")
    secrets.chmod(0o600)
    done = stand_ins.run(job, SlurmOptions())
    assert [call.env["TOKEN"] for call in done.of("ddprun")[1:]] == ["hidden", "hidden"]
    assert not secrets.exists()


@pytest.mark.parametrize("runtime", ["none", "pyxis"])
def test_secrets_stay_for_the_start_after_a_requeue(stand_ins: StandIns, runtime: Any) -> None:
    secrets = stand_ins.folder / "runs" / "train-4711" / "secrets"
    secrets.parent.mkdir(parents=True)
    job, options = replace(JOB, secrets=("TOKEN",)), SlurmOptions(runtime=runtime)
    preempted, unknown = {"REQUEUED": "1"}, {"REQUEUED": "?"}
    for code, env, exists in (("143", {}, True), ("1", {}, False), ("1", preempted, True), ("1", unknown, True)):
        secrets.write_text("export TOKEN=hidden\n")
        secrets.chmod(0o600)
        done = stand_ins.run(job, options, CODE=code, **env)
        assert (done.code, secrets.exists()) == (int(code), exists)


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
    assert [call.argv for call in done.of("scontrol")[3:]] == [("requeue", "4711")] * requeued
    assert done.code == int(code)
    assert [line for line in done.output.splitlines() if "requeued" in line and "requeues" not in line] == (
        ["slurm: requeued"] if requeued else []
    )


def test_no_requeue_beyond_the_cap_or_outside_of_a_batch_job(stand_ins: StandIns) -> None:
    env = {"CODE": "143", "OUTCOME": RETRY}
    capped = [stand_ins.run(JOB, SlurmOptions(requeues=2), **env, SLURM_RESTART_COUNT=str(n)) for n in range(3)]
    assert [len(done.of("scontrol")) for done in capped] == [4, 4, 3]
    assert "limit of 2" in capped[2].output.splitlines()[-1]
    inside = stand_ins.run(JOB, SlurmOptions(), **env, ENVIRONMENT="")
    assert (inside.code, len(inside.of("scontrol"))) == (143, 3)


@contextlib.contextmanager
def start(stand_ins: StandIns, options: SlurmOptions) -> Iterator["subprocess.Popen[bytes]"]:
    """A job of one node, whose srun or ddprun a test has replaced; what scancel is asked is in the file ``told``."""
    signalled = stand_ins.folder / "told"
    (stand_ins.folder / "bin" / "scancel").write_text(f'#!/bin/bash\necho "$*" >>{signalled}\n')
    script = stand_ins.folder / "job.sh"
    script.write_text(render_script(stand_ins.plan(replace(JOB, nodes="1")), options))
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


def wait_for_go(stand_ins: StandIns, go: Path) -> None:
    """Let ddprun write the number of its step, and run until the file ``go`` exists."""
    program = stand_ins.folder / "bin" / "ddprun"
    wait = f"while [[ ! -e {go} ]]; do sleep 0.05; done\nexit 143\n"
    program.write_text(program.read_text().replace('exit "${CODE:-0}"', wait))


@pytest.mark.parametrize(
    ("runtime", "signals", "num_signals", "requeued"),
    [
        pytest.param("none", ["USR1"], 1, True, id="warning"),
        pytest.param("none", ["USR2"], 1, False, id="stop"),
        pytest.param("none", ["TERM"], 1, False, id="kill-of-the-script"),
        pytest.param("none", ["USR1", "USR2"], 1, False, id="warning-and-stop"),
        pytest.param("none", ["USR2", "USR2"], 2, False, id="two-stops"),  # the second one kills
        pytest.param("pyxis", ["USR1"], 1, True, id="warning-in-a-container"),
    ],
)
def test_a_signal_is_handed_on_to_the_step(
    stand_ins: StandIns, runtime: Runtime, signals: list[str], num_signals: int, requeued: bool
) -> None:
    signalled, go, run_dir = stand_ins.folder / "told", stand_ins.folder / "go", stand_ins.folder / "runs/train-4711"
    wait_for_go(stand_ins, go)
    with start(stand_ins, SlurmOptions(runtime=runtime)) as job:
        assert job.stderr is not None
        until((run_dir / "step").exists)
        lines = [job.stderr.readline()]  # of the start
        for name in signals:
            job.send_signal(getattr(signal, f"SIG{name}"))
            if name != "TERM" and runtime == "none":
                lines.append(job.stderr.readline())  # it was heard
        until(lambda: signalled.exists() and len(signalled.read_text().splitlines()) == num_signals)
        go.touch()
        assert job.wait(30) == 143
    assert {line.removeprefix("--quiet ") for line in signalled.read_text().splitlines()} == {"--signal=TERM 4711.1"}
    assert len(signalled.read_text().splitlines()) == num_signals
    assert was_requeued(stand_ins) == requeued


def test_the_directives_of_every_option() -> None:
    job = replace(JOB, cpus=8, memory="64Gi", time_limit="30h", grace=120)
    options = SlurmOptions(
        partition="a100,h100", account="lab@x", qos="high", reservation="r1", constraint="a100&[r1|r2]", exclusive=True,
        gpu_type="a100", gpu_request="gres", array="0-3%2", requeues=0, extra=("--mail-type=END", "--licenses=x:2"),
    )  # fmt: skip
    assert directives(job, options) == (
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:a100:2",
        "--mem=65536M", "--time=1-06:00:00", "--partition=a100,h100", "--account=lab@x", "--qos=high",
        "--reservation=r1", "--constraint=a100&[r1|r2]", "--array=0-3%2", "--exclusive", "--signal=B:USR1@180",
        "--no-requeue", "--open-mode=append", "--mail-type=END", "--licenses=x:2",
    )  # fmt: skip
    lines = directives(JOB, SlurmOptions(gpu_request="gres", extra=("--gres=disk:10", "--mem=0")))
    own = [line for line in lines if line.startswith(("--gres", "--mem"))]
    assert own == ["--gres=gpu:2,disk:10", "--mem=0"], "sbatch takes the last"
    spares = replace(JOB, nodes="3", spares=2)
    assert {"--nodes=5", "--no-kill"} <= {*directives(spares, SlurmOptions())}, "it survives the loss of a node"
    assert [key for key, _ in SlurmOptions(runtime="docker").problems(spares)] == ["job.spares"]


@pytest.mark.parametrize(
    ("extra", "cause"),
    [("--nodes=3", "the key nodes"), ("--gres=disk:1,gpu:2", "gpu_request"), ("--mem=4G", "the key memory"),
     ("--signal=USR1", "no key"), ("--comment=a b", "blanks"), ("-p x", "--NAME"), ("--x=1\ntouch /tmp/x", "--NAME")],
)  # fmt: skip
def test_an_extra_option_that_is_ours_or_no_option_is_refused(extra: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        check_extra((extra,))


def test_a_problem_of_the_options_is_named_by_its_key() -> None:
    job = replace(JOB, time_limit="2m", grace=35.0, memory="64Gi", env={"SLURM_X": "1"})
    problems = list(SlurmOptions(sif="/x.sif", extra=("--mem=0",)).problems(job))
    assert [key for key, _ in problems] == ["job.time_limit", "target.sif", "target.extra", "job.env"]
    assert [
        fact in message
        for fact, (_, message) in zip(("at least 4m", "'apptainer'", "64Gi", "SLURM_X"), problems, strict=True)
    ] == [True] * 4
