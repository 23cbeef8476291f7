"""Whole command lines of a node's container."""

import shlex
import subprocess
from pathlib import Path

import pytest

from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.ssh.options import SshOptions
from ddpctl.targets.ssh.scripts import launch_container, run_args

JOB = JobSpec(command=("train.py",), cpus=8, memory="2Gi", shm="1Gi", time_limit="1h", mounts=("/data:/data:ro",))


PLAN = Plan(name="night", job=JOB, cwd="/here", folder="/runs/night", checkpoint_dir="/checkpoints")


def test_podman_with_all_that_a_job_may_ask_for() -> None:
    argv = run_args(
        SshOptions(hosts=(), runtime="podman", runtime_args=("--device=/dev/x y",), network="lab"),
        PLAN,
        3,
        image="sha256:aa",
        user="1000:100",
        run_dir="/home/alice/.ddpctl/runs/night",
        gpus=("GPU-0", "GPU-1"),
        project="/home/alice/code",
        checkpoints="/nfs/night",
    )
    assert shlex.join(argv) == (
        "podman run --detach --rm --init --name=ddpctl-night-3 --label=ddpctl.run=night --label=ddpctl.node=3 "
        "--network=lab --user=1000:100 '--env-file=$_ddp_env' --shm-size=1073741824 --cap-drop=ALL "
        "--security-opt=no-new-privileges --read-only --tmpfs=/tmp:rw,exec,nosuid,nodev "
        "--volume=/home/alice/.ddpctl/runs/night:/runs/night --volume=/nfs/night:/checkpoints "
        "--volume=/home/alice/code:/workspace --workdir=/workspace --volume=/data:/data:ro '--device=/dev/x y' "
        "--device=nvidia.com/gpu=GPU-0 --device=nvidia.com/gpu=GPU-1 --ulimit=memlock=-1:-1 '$_ddp_infiniband' "
        "--cpus=8 --memory=2147483648 --userns=keep-id --entrypoint=/bin/sh sha256:aa -c "
        """'exec ddprun "$@" >>"$DDP_RUN_DIR/node-$PET_NODE_RANK/node.log" 2>&1' """
        "ddprun --grace 30 --deadline 3600 train.py"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_container_with_gpus_gets_the_infiniband_devices_of_its_host(tmp_path: Path, *, exists: bool) -> None:
    devices = tmp_path / "infiniband"
    if exists:
        devices.mkdir()
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$OUT"\n')
    (tmp_path / "docker").chmod(0o755)
    options = SshOptions(hosts=(), home=str(tmp_path))
    argv = run_args(options, PLAN, 0, image="i", user="1:1", run_dir="/r", gpus=("GPU-0",))
    (tmp_path / "runs/night").mkdir(parents=True)
    text = launch_container(options, "night", argv, "A=1\n")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    script = text.replace("/dev/infiniband", str(devices))
    subprocess.run(["/bin/sh", "-eu"], input=script, text=True, env=env, check=True, timeout=30)
    arguments = (tmp_path / "out").read_text().splitlines()
    assert [word for word in arguments if "infiniband" in word] == ([f"--device={devices}"] if exists else [])
    assert "" not in arguments
