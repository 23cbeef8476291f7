"""ddpctl as a person meets it: help, speed, versions, init. Real processes."""

import os
import re
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from platform import python_version

import pytest
import yaml

DDPCTL = (sys.executable, "-m", "ddpctl")
VERBS = (
    "launch",
    "render",
    "ps",
    "status",
    "logs",
    "stop",
    "top",
    "report",
    "timeline",
    "rm",
    "attach",
    "exec",
    "shell",
    "suspend",
    "resume",
    "pull",
    "provision",
    "init",
    "schema",
    "version",
    "image",
    "monitor",
)


def ddpctl(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DDPCTL, *args], capture_output=True, text=True, timeout=60, cwd=cwd, env={**os.environ, **env}
    )


def test_help_is_quick() -> None:
    """Under 0.15 s of CPU; the best of five, since machines are noisy."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert ddpctl("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.15, spent


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb: str) -> None:
    """Typer itself imports pydantic for a verb that takes a list; the list of verbs needs neither."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *DDPCTL[1:], *verb.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    heavy = {"torch", "fabric", "yaml", "rich", "numpy"} | (set() if verb else {"pydantic"})
    assert imported & heavy == set()


def test_every_verb_is_in_the_help() -> None:
    lines = ddpctl("--help").stdout.splitlines()
    listed = tuple(line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line.strip())
    assert listed == VERBS
    assert not [line for line in lines[1:] if line.endswith("...")], "a verb's first sentence is too long for the list"


def test_version() -> None:
    assert ddpctl("version").stdout == (
        f"ddpctl {metadata.version('ddpctl')}\npython {python_version()}\n"
        f"torch {metadata.version('torch')}\ntorchvision {metadata.version('torchvision')}\n"
    )


def test_init_writes_a_file_that_launch_takes(tmp_path: Path) -> None:
    done = ddpctl("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "wrote ddpctl.yaml: ddpctl launch runs it, ddpctl launch --dry-run shows what would run\n"
    text = (tmp_path / "ddpctl.yaml").read_text()
    assert "for this machine: no GPU, " in text
    rendered = ddpctl("render", cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    found = yaml.safe_load(re.sub(r"^  # (?=boxes|hpc|cluster|t4s|  )", "  ", text, flags=re.M))
    assert {name: target["kind"] for name, target in found["targets"].items()} == {
        "here": "local", "boxes": "ssh", "hpc": "slurm", "cluster": "kubernetes", "t4s": "kaggle"
    }  # fmt: skip
    (tmp_path / "all.yaml").write_text(re.sub(r"^  # (?=boxes|hpc|cluster|t4s|  )", "  ", text, flags=re.M))
    assert ddpctl("render", "-f", "all.yaml", cwd=tmp_path).returncode == 0
    again = ddpctl("init", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        2,
        "ddpctl: ddpctl.yaml is there already: --force writes over it, or name another file\n",
    )
    assert (tmp_path / "ddpctl.yaml").read_text() == text


def test_completion_knows_the_shells() -> None:
    done = ddpctl("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "complete -o default -F _ddpctl_completion ddpctl"
