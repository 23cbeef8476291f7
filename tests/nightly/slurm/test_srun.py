"""ddprun under a real srun, on two nodes: a code comes out of every node, and of srun and the job, as it went in."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster import slurm_lab

from ddpwire.run_files import Outcome, read_outcome

pytestmark = pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-")
ROOT = Path(__file__).parents[3]
ACT = ROOT / "tests" / "fixtures" / "ranks" / "act.py"
GLOO = ROOT / "tests" / "nightly" / "ddprun" / "scripts" / "gloo.py"
STEP = ("srun", "--nodes=2", "--kill-on-bad-exit=0", "--cpus-per-task=2")
ONE_A_NODE = (*STEP, "--ntasks-per-node=1", "--wait=60")
ONE_A_GPU = (*STEP, "--ntasks-per-node=2", "--gpus-per-node=2")
# A task writes its ddprun's code down, and ends with it; Slurm signals every process of a step, this shell included.
TASK = 'trap : TERM USR1; "$@"; code=$?; echo $code >"$DDP_RUN_DIR/code.$SLURM_NODEID.$SLURM_LOCALID"; exit $code'
ONCE = ("--max-restarts", "0")


@dataclass(frozen=True, kw_only=True)
class Job:
    """ddpruns that srun has started."""

    process: subprocess.Popen[bytes]
    folder: Path

    def end(self) -> int:
        """srun's own exit code."""
        return self.process.wait(90)

    def codes(self) -> dict[str, int]:
        """Each task's code, by NODE.TASK."""
        return {path.name[5:]: int(path.read_text()) for path in sorted(self.folder.glob("code.*"))}

    def outcomes(self) -> list[Outcome]:
        return [read_outcome(path.read_text()) for path in sorted(self.folder.glob("node-*/outcome.json"))]

    def is_ready(self, num_ranks: int) -> bool:
        return sum(path.read_text().startswith("ready") for path in self.folder.glob("node-*/rank-*.log")) == num_ranks


Launch = Callable[..., Job]


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_lab.Slurm]:
    with slurm_lab.cluster(3, prefix="srun") as cluster:
        yield cluster


@pytest.fixture
def launch(slurm: slurm_lab.Slurm, tmp_path: Path) -> Iterator[Launch]:
    jobs: list[Job] = []

    def launch(step: tuple[str, ...], *ddprun: str, task: str = TASK) -> Job:
        tmp_path.chmod(0o755)
        env = {"DDP_RUN_DIR": str(tmp_path), "DDP_DEVICE": "cpu", "PYTHONPATH": os.environ["PYTHONPATH"]}
        command = ("sh", "-c", task, "task", sys.executable, "-m", "ddprun", *ddprun)
        jobs.append(
            Job(
                process=slurm.start(*step, "--job-name=ddp", *command, output=tmp_path / "srun.log", env=env),
                folder=tmp_path,
            )
        )
        return jobs[-1]

    yield launch
    slurm.run("scancel", "--name=ddp", "--signal=KILL")
    for job in jobs:
        job.process.kill()
        job.process.wait(10)
    until(lambda: not slurm.run("squeue", "-h").stdout)


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def signalled(slurm: slurm_lab.Slurm, job: Job, name: str, num_ranks: int = 2) -> None:
    """Signal the step's tasks, once the ranks are there."""
    until(lambda: job.is_ready(num_ranks))
    step = slurm.run("squeue", "-h", "-s", "-o", "%i").stdout.split()[0]
    assert slurm.run("scancel", f"--signal={name}", step).returncode == 0


def test_ranks_of_two_nodes_train_together(launch: Launch) -> None:
    job = launch(ONE_A_NODE, "--nproc-per-node=1", str(GLOO))
    assert (job.end(), job.codes()) == (0, {"0.0": 0, "1.0": 0})
    said = [(job.folder / f"node-{node}" / f"rank-{node}.log").read_text().splitlines()[-1] for node in (0, 1)]
    assert said == ["world 2: 2"] * 2


CODES = [("3", 3, 0), ("-9", 137, 1), ("142", 142, 1)]  # the others, without srun: tests/unit/ddprun/test_exit_codes.py


@pytest.mark.parametrize(("deed", "code", "first"), CODES)
def test_whoever_fails_first_the_code_is_that_of_all(launch: Launch, deed: str, code: int, first: int) -> None:
    job = launch(ONE_A_NODE, *ONCE, "--nproc-per-node=1", str(ACT), f"{first}={deed}")
    assert (job.end(), job.codes()) == (code, {"0.0": code, "1.0": code})
    assert [(outcome.code, outcome.rank) for outcome in job.outcomes()] == [(code, first)] * 2


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("USR1", 138)])
def test_a_signal_to_the_step_lets_all_ranks_save(slurm: slurm_lab.Slurm, launch: Launch, name: str, code: int) -> None:
    job = launch(ONE_A_NODE, "--nproc-per-node=1", str(ACT), "all=save")
    signalled(slurm, job, name)
    assert (job.end(), job.codes()) == (code, {"0.0": code, "1.0": code})


def test_hang_of_a_rank_is_the_code_of_both_nodes(launch: Launch) -> None:
    job = launch(ONE_A_NODE, *ONCE, "--hang-timeout=2", "--nproc-per-node=1", str(ACT), "1=-19")
    assert (job.end(), job.codes()) == (144, {"0.0": 144, "1.0": 144})


def test_absence_of_a_node_is_the_code_of_the_others(launch: Launch) -> None:
    away = f'[ "$SLURM_NODEID" = 2 ] && exit 0; {TASK}'
    step = tuple(word.replace("--nodes=2", "--nodes=3") for word in ONE_A_NODE)
    job = launch(step, "--join-timeout=30", "--nproc-per-node=1", str(ACT), task=away)
    assert (job.end(), job.codes()) == (142, {"0.0": 142, "1.0": 142})
    assert [outcome.cause for outcome in job.outcomes()] == ["absent"] * 2
    assert all("node 2 of 3" in outcome.message for outcome in job.outcomes())


def test_nodes_with_different_images_are_refused(launch: Launch) -> None:
    other = f"export DDP_IMAGE=train:$SLURM_NODEID; {TASK}"
    job = launch(ONE_A_NODE, "--nproc-per-node=1", str(ACT), task=other)
    assert (job.end(), job.codes()) == (78, {"0.0": 78, "1.0": 78})
    for outcome in job.outcomes():
        assert "train:1 on node 1" in outcome.message
        assert "train:0 on node 0" in outcome.message


@pytest.mark.parametrize(("deed", "code"), [("0", 0), ("65", 65)])
def test_with_one_task_a_gpu_the_first_of_each_node_stands_for_all(launch: Launch, deed: str, code: int) -> None:
    job = launch(ONE_A_GPU, *ONCE, str(ACT), *(() if deed != "0" else ("all=0",)), f"3={deed}")
    assert (job.end(), job.codes()) == (code, {"0.0": code, "0.1": 0, "1.0": code, "1.1": 0})
    assert sorted(path.name for path in job.folder.glob("node-*/rank-*.log")) == [
        f"rank-{rank}.log" for rank in range(4)
    ]


@pytest.mark.parametrize(("deed", "code"), [("65", 65), ("-9", 137)])  # 0: test_slurm.py
def test_a_batch_job_has_the_code_too(slurm: slurm_lab.Slurm, tmp_path: Path, deed: str, code: int) -> None:
    tmp_path.chmod(0o755)
    script = tmp_path / "train.sbatch"
    step = " ".join(("srun", *ONE_A_NODE[2:]))
    script.write_text(
        f"#!/bin/sh\n{step} {sys.executable} -m ddprun --max-restarts=0 --nproc-per-node=1 {ACT} all=0 0={deed}\n"
    )
    env = {"DDP_RUN_DIR": str(tmp_path), "DDP_DEVICE": "cpu", "PYTHONPATH": os.environ["PYTHONPATH"]}
    options = (
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        f"--output={tmp_path}/job.log",
        "--parsable",
    )
    done = slurm.run("sbatch", *options, str(script), env=env, timeout_s=90)
    assert (done.returncode, done.stderr) == (code, "")
    shown = slurm.run("scontrol", "show", "job", done.stdout.strip()).stdout
    assert [word for word in shown.split() if word.startswith("ExitCode=")] == [f"ExitCode={code}:0"]
