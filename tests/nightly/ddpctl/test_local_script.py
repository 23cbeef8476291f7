"""The script that the target local renders, run for real, with a stand-in for the interpreter."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl.test_local import JOB, PLAN

from ddpctl.job.launch_plan import Plan
from ddpctl.targets.local import LocalOptions, LocalTarget


def run_script(folder: Path, plan: Plan, **env: str) -> tuple[int, list[str], str]:
    """Run a rendered script with a stand-in for the interpreter: its code, each node's GPUs, its errors."""
    stand_in = folder / "python"
    stand_in.write_text(
        "#!/bin/bash\n[[ $4 != port ]] || { echo 1; exit; }\n"
        f'[[ $4 != gpus ]] || exec {sys.executable} "$@"\n'
        'echo "$CUDA_VISIBLE_DEVICES" >"$DDP_RUN_DIR/$PET_NODE_RANK"\n'
    )
    stand_in.chmod(0o755)
    script = LocalTarget(LocalOptions(python=str(stand_in))).render(plan)
    run_dir = folder / "run"
    env = {"PATH": f"{folder}:/usr/bin:/bin", "RUN_DIR": str(run_dir), **env}
    done = subprocess.run(["/bin/bash", "-c", script], env=env, capture_output=True, text=True, timeout=20)
    return done.returncode, [path.read_text().strip() for path in sorted(run_dir.glob("[0-9]*"))], done.stderr


TWO = replace(PLAN, job=replace(JOB, gpus=1))


@pytest.mark.parametrize(
    ("variable", "shares"),
    [
        ("0, 2,-1,1", ["0", "2"]),
        ("-1,0,1", ["", ""]),
        (" +0,007", ["0", "7"]),
        ("01,1", ["", ""]),
        ("", ["", ""]),
        ("NoDevFiles", ["", ""]),
        ("1,0,1", ["", ""]),
        ("GPU-a,GPU-b,1", ["GPU-a", "GPU-b"]),
        ("1", []),
        ("GPU-a,1", []),
        ("MIG-a,MIG-b", []),
    ],
)
def test_the_rendered_script_reads_cuda_visible_devices_as_cuda_does(
    variable: str, shares: list[str], tmp_path: Path
) -> None:
    code, num_gpus, output = run_script(tmp_path, TWO, CUDA_VISIBLE_DEVICES=variable)
    assert (code, num_gpus) == (0 if shares else 78, shares)
    assert ("MIG" in output) == variable.startswith("MIG-")


@pytest.mark.parametrize(
    ("answer", "code", "shares"),
    [
        ("echo warning >&2; echo GPU-a; echo WARNING: infoROM is corrupted; echo GPU-b", 0, ["GPU-a", "GPU-b"]),
        ("echo Failed to initialize NVML", 0, ["", ""]),
        ("echo No devices were found; exit 6", 0, ["", ""]),
        ("echo GPU-a; echo Unknown Error; exit 15", 69, []),
        ("exit 127", 0, ["", ""]),
    ],
)
def test_the_rendered_script_takes_no_error_for_a_gpu(
    answer: str, code: int, shares: list[str], tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    exited, num_gpus, output = run_script(tmp_path, TWO)
    assert (exited, num_gpus) == (code, shares)
    assert ("nvidia-smi failed (Unknown Error)\n" in output) == (code == 69)


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
