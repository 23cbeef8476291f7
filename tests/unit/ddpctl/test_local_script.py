"""The script that the target local renders, run for real, with a stand-in for the interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.local import LocalOptions, LocalTarget

JOB = JobSpec(name="digits", nodes="2", gpus=2, command=("train.py", "--lr", "0.1"), env={"A": "b c"})
PLAN = Plan(name="digits-otter", job=JOB, cwd="/project", folder="/runs/digits-otter", checkpoint_dir="/ckpt")


def test_the_rendered_script_starts_every_node_with_its_share(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/bash\n[[ $4 != port ]] || { echo '{\"port\": 40001}'; exit; }\n"
        f'[[ $4 != gpus ]] || exec {sys.executable} "$@"\n'
        'echo "$PET_NODE_RANK $PET_NNODES $PET_MASTER_PORT [$CUDA_VISIBLE_DEVICES] $DDP_JOB_ENV $*" '
        '>"$DDP_RUN_DIR/$PET_NODE_RANK"\n'
        "exit $((PET_NODE_RANK * 3))\n"
    )
    stand_in.chmod(0o755)
    script = LocalTarget(LocalOptions(python=str(stand_in))).render(PLAN)
    env = {"PATH": "/usr/bin:/bin", "RUN_DIR": str(tmp_path / "run"), "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    done = subprocess.run(["/bin/bash", "-c", script], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3
    assert str(tmp_path / "run") in done.stderr
    carried = '{"A": "b c"}'
    args = "-P -m ddprun --grace 30 train.py --lr 0.1"
    assert (tmp_path / "run/0").read_text() == f"0 2 40001 [4,5] {carried} {args}\n"
    assert (tmp_path / "run/1").read_text() == f"1 2 40001 [6,7] {carried} {args}\n"

    done = subprocess.run(
        ["/bin/bash", "-c", script],
        env={**env, "CUDA_VISIBLE_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 78
    assert ("4 GPUs" in done.stderr, "has 1" in done.stderr) == (True, True)


def test_the_rendered_script_passes_sigterm_on(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/bash\n[[ $4 != port ]] || { echo 1; exit; }\n[[ $4 != gpus ]] || exit 0\n"
        "trap 'exit 143' TERM\necho up >\"$DDP_RUN_DIR/$PET_NODE_RANK\"\nwhile :; do /bin/sleep 0.05; done\n"
    )
    stand_in.chmod(0o755)
    script = LocalTarget(LocalOptions(python=str(stand_in))).render(PLAN)
    env = {"PATH": "/usr/bin:/bin", "RUN_DIR": str(tmp_path / "run")}
    process = subprocess.Popen(["/bin/bash", "-c", script], env=env)
    try:
        while not all((tmp_path / "run" / node).exists() for node in "01"):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 143
    finally:
        process.kill()
