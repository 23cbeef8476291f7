"""Nothing is started unless all hosts are ready."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.ddpctl.ssh_answers import facts, inspected, submit

from ddpctl.command import Output
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import parse_facts
from ddpctl.targets.ssh.scripts import facts_script
from ddpwire.run_files import COPY, COPY_PART

MANIFEST = json.dumps({"step": 40, "files": [["a", 1, 2, "00"]]}, indent=1) + "\n"


@pytest.mark.parametrize(
    ("code", "gpus", "error"), [(0, ("GPU-1", "GPU-2"), ""), (6, (), ""), (15, (), "exit code 15: GPU-2")]
)
def test_nvidia_smi_lists_gpus_or_fails(code: int, gpus: tuple[str, ...], error: str, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf 'GPU-1\\nGPU-2\\n'\nexit {code}\n")
    smi.chmod(0o755)
    script = facts_script(SshOptions(hosts=(SshHost(address="box1"),), runtime="none"), image="", script=None)
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=script, env=env, capture_output=True, text=True, timeout=60, check=True)
    answer = parse_facts(Output(returncode=0, stdout=done.stdout))
    assert (answer.failure, answer.gpus, answer.get("gpu_error")) == ("", gpus, error)


@pytest.mark.parametrize(
    ("installed", "error"),
    [
        ((), "no torch in it"),
        (("torch",), "no ddprun in it"),
        (("torch", "ddprun"), ""),
        (None, "exec: x: not found"),
    ],
)
def test_what_a_python_lacks_is_named(installed: tuple[str, ...] | None, error: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec " + ("x" if installed is None else f'{sys.executable} -S "$@"') + "\n")
    python.chmod(0o755)
    for name in installed or ():
        (tmp_path / f"{name}.py").touch()
    options = SshOptions(hosts=(SshHost(address="box1"),), runtime="none", python=str(python))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    script = facts_script(options, image="", script=None)
    done = subprocess.run(["/bin/sh"], input=script, env=env, capture_output=True, text=True, timeout=60, check=True)
    answer = parse_facts(Output(returncode=0, stdout=done.stdout))
    engine_error = answer.get("engine_error")
    assert (error in engine_error, bool(engine_error)) == (True, bool(error))
    assert answer.get("engine").startswith("Python") == (error == "")


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        pytest.param({}, ("", 0, 0), id="empty"),
        pytest.param({".lock": "", ".x.part": ""}, ("", 0, 0), id="hidden"),
        pytest.param({"step-8.pt": ""}, ("step-8.pt", 0, 0), id="no-copies"),
        pytest.param({"step-8.pt": "", COPY: MANIFEST}, ("step-8.pt", 40, 0), id="copy"),
        pytest.param({"a/b": "", COPY_PART: MANIFEST}, ("", 0, 40), id="cut"),
        pytest.param({"a/b": "", COPY: MANIFEST, COPY_PART: MANIFEST.replace("40", "50")}, ("a", 40, 50), id="newer"),
        pytest.param({"a": "", COPY: MANIFEST.replace("40", "null")}, ("a", 0, 0), id="unknown-step"),
    ],
)
def test_a_host_says_which_checkpoint_it_has(
    files: dict[str, str], arguments: tuple[str, int, int], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_text(text)
    options = SshOptions(hosts=(SshHost(address="box1"),), runtime="none")
    script = facts_script(options, image="", script=None, checkpoints="~/c")
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=script, env=env, capture_output=True, text=True, timeout=60, check=True)
    answer = parse_facts(Output(returncode=0, stdout=done.stdout))
    assert answer.failure == ""
    assert (answer.get("checkpoint"), answer.step("copy"), answer.step("announced")) == arguments


def test_an_image_is_the_same_by_a_registrys_digest() -> None:
    digest = "reg/ddpctl@sha256:" + "c" * 64
    submit(facts(1, image=inspected(digests=(digest,))), facts(2, image=inspected("sha256:bb", (digest,))))
