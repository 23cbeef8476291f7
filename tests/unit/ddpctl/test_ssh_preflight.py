"""Nothing is started unless all hosts are ready."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.ssh_answers import GPUS, facts, inspected, submit

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, NotStartedError, UnavailableError
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import parse_facts
from ddpctl.targets.ssh.scripts import facts_script
from ddpwire.run_files import COPY, COPY_PART

MANIFEST = json.dumps({"step": 40, "files": [["a", 1, 2, "00"]]}, indent=1) + "\n"
REFUSALS: list[tuple[str, dict[str, Any], type[DdpctlError], str]] = [
    ("silent", {"end": None}, UnavailableError, "without an error message"),
    (
        "engine",
        {"engine": None, "image": None, "engine_error": "Cannot connect to the Docker daemon"},
        UnavailableError,
        "docker: Cannot connect to the Docker daemon",
    ),
    ("flock", {"flock": None}, UnavailableError, "util-linux"),
    ("writable", {"writable": None}, UnavailableError, "~/.ddpctl"),
    ("disk", {"disk": "1024"}, UnavailableError, "min_disk"),
    (
        "claim",
        {"gpu": GPUS, "claim": f"old 0 970 none {GPUS[0]} {GPUS[2]}", "now": "1000"},
        UnavailableError,
        "run 'old' has been using 2 GPUs for 30 s",
    ),
    ("ticket", {"gpu": GPUS, "ticket": "000000001 old 12ab"}, UnavailableError, "run 'old' is already waiting"),
    (
        "claims",
        {"gpu": GPUS, "claims_error": "another launch is starting a run there"},
        UnavailableError,
        "another launch is starting a run there",
    ),
    ("no-image", {"image": None}, ConfigError, "ddpctl:1"),
    ("other-image", {"image": inspected("sha256:bb")}, ConfigError, "sha256:bb"),
    ("too-few-gpus", {"gpu": GPUS[:1]}, ConfigError, "1 GPU, not 2"),
    ("busy-gpus", {"gpu": GPUS, "busy": GPUS[:2]}, UnavailableError, "1 of 3"),
    (
        "nvidia-smi",
        {"gpu_error": "exit code 15: GPU is lost", "gpu": GPUS},
        UnavailableError,
        "exit code 15: GPU is lost",
    ),
    ("nvidia-runtime", {"gpu": GPUS, "runtimes": "{}"}, UnavailableError, "nvidia-container-toolkit"),
    ("same-machine", {"machine": "gpu1 /home/alice 12ab"}, ConfigError, "box2 and box1"),
]


@pytest.mark.parametrize(("changes", "kind", "cause"), [pytest.param(*row, id=name) for name, *row in REFUSALS])
def test_a_host_that_is_not_ready_is_refused(changes: dict[str, Any], kind: type[DdpctlError], cause: str) -> None:
    gpus = {"gpu": GPUS} if "gpu" in changes else {}
    with pytest.raises(kind) as error:
        submit(facts(1, machine="gpu1 /home/alice 12ab", **gpus), facts(2, **changes))
    lines = str(error.value).splitlines()
    assert (type(error.value), type(error.value.__cause__)) == (kind, NotStartedError)
    assert "1 of 2" in lines[0]
    assert [(line.split()[0], line.endswith("not ready")) for line in lines[2:4]] == [("box1", False), ("box2", True)]
    (sentence,) = lines[4:]
    assert (sentence.startswith("box2: "), cause in sentence) == (True, True)


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
    found = parse_facts(Output(returncode=0, stdout=done.stdout))
    assert (found.failure, found.gpus, found.get("gpu_error")) == ("", gpus, error)


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
    found = parse_facts(Output(returncode=0, stdout=done.stdout))
    assert found.get("engine_error")[-len(error) or None :] == error
    assert found.get("engine").startswith("Python") == (error == "")


@pytest.mark.parametrize(
    ("files", "words"),
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
    files: dict[str, str], words: tuple[str, int, int], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_text(text)
    options = SshOptions(hosts=(SshHost(address="box1"),), runtime="none")
    script = facts_script(options, image="", script=None, checkpoints="~/c")
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=script, env=env, capture_output=True, text=True, timeout=60, check=True)
    found = parse_facts(Output(returncode=0, stdout=done.stdout))
    assert found.failure == ""
    assert (found.get("checkpoint"), found.number("step"), found.number("announced")) == words


def test_an_image_is_the_same_by_a_registrys_digest() -> None:
    digest = "reg/ddpctl@sha256:" + "c" * 64
    submit(facts(1, image=inspected(digests=(digest,))), facts(2, image=inspected("sha256:bb", (digest,))))
