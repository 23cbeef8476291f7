"""What the batch script gives a container of the job's share and of the site's network, run against stand-ins."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.slurm_standins import StandIns
from tests.unit.ddpctl.test_slurm_batch_script import IMAGE, JOB

from ddpctl.targets.slurm.batch_script import render_script
from ddpctl.targets.slurm.options import SlurmOptions

SITE = {"NCCL_IB_HCA": "mlx5", "UCX_TLS": "rc"}


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def extend(stand_ins: StandIns, program: str, text: str) -> None:
    """Let a stand-in do something more."""
    path = stand_ins.folder / "bin" / program
    path.write_text((path.read_text() if path.exists() else "#!/bin/bash\n") + text)
    path.chmod(0o755)


def given(stand_ins: StandIns, engine: Any, **env: str) -> set[str]:
    """The options of a container that depend on the job's share of the node."""
    done = stand_ins.run(JOB, SlurmOptions(runtime=engine), **env)
    assert done.code == 0, done.output
    argv = next(call.argv for call in done.of(engine) if call.argv[0] == "run")
    names = ("--memory", "--cpus", "--gpus", "--device", "--ulimit", "--cgroups")
    return {word for word in argv if word.startswith(names)} - {"--device=/dev/infiniband", "--ulimit=memlock=-1"}


def test_dockers_container_gets_the_jobs_memory_and_cores(stand_ins: StandIns) -> None:
    limits = given(stand_ins, "docker", MEMORY="MinMemoryNode=2G", SLURM_MEM_PER_NODE="9", SLURM_CPUS_ON_NODE="8")
    assert limits == {"--memory=2G", "--cpus=4"}
    limits = given(stand_ins, "docker", MEMORY="MinMemoryCPU=512M", SLURM_MEM_PER_NODE="9", SLURM_CPUS_ON_NODE="4")
    assert limits == {"--memory=2048M", "--cpus=4"}
    assert given(stand_ins, "docker", SLURM_CPUS_PER_TASK="") == {"--memory=0", "--cpus=0"}  # no limit


def test_podmans_container_stays_in_the_jobs_cgroup_where_crun_runs_it(stand_ins: StandIns) -> None:
    assert given(stand_ins, "podman") == set()
    extend(stand_ins, "podman", "[[ $1 != info ]] || echo crun\n")
    assert given(stand_ins, "podman") == {"--cgroups=disabled"}


def test_what_the_site_sets_for_its_network_goes_in(stand_ins: StandIns) -> None:
    _, *nodes = stand_ins.run(JOB, SlurmOptions(runtime="apptainer"), **SITE).of("apptainer")
    for call in nodes:
        assert {name: call.env[f"APPTAINERENV_{name}"] for name in SITE} == SITE
    assert len(nodes) == 2


def test_a_container_gets_only_the_gpus_of_the_job(stand_ins: StandIns) -> None:
    env = {"SLURM_CPUS_PER_TASK": "", "SLURM_STEP_GPUS": "0,3"}
    assert given(stand_ins, "docker", **env) == {"--memory=0", "--cpus=0", '--gpus="device=0,3"'}
    assert given(stand_ins, "podman", **env) == {"--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=3"}


def test_an_image_that_cannot_be_pulled_ends_the_job(stand_ins: StandIns) -> None:
    extend(stand_ins, "apptainer", "[[ $1 != pull ]] || exit 255\n")
    done = stand_ins.run(JOB, SlurmOptions(runtime="apptainer"))
    assert done.code == 69
    assert done.of("srun") == ()
    images = stand_ins.folder / "home/.cache/ddpctl/images"
    assert [path.suffix for path in images.iterdir()] == [".lock"]  # nothing half done


def test_two_jobs_at_once_pull_one_image(stand_ins: StandIns) -> None:
    log = stand_ins.folder / "pulls"
    extend(stand_ins, "apptainer", f'[[ $1 != pull ]] || {{ echo "$4" >>{log}; sleep 1; echo image >"$3"; }}\n')
    script = stand_ins.folder / "job.sh"
    script.write_text(render_script(stand_ins.plan(JOB), SlurmOptions(runtime="apptainer")))
    jobs = []
    for number in ("1", "2"):
        records = stand_ins.folder / f"records-{number}"
        records.mkdir()
        env = stand_ins.environ | {"SLURM_JOB_ID": number, "RECORDS": str(records)}
        jobs.append(subprocess.Popen(["/bin/bash", str(script)], env=env, cwd=stand_ins.folder))
    deadline = time.monotonic() + 60
    assert [job.wait(deadline - time.monotonic()) for job in jobs] == [0, 0]
    assert log.read_text() == f"docker://{IMAGE}\n"
