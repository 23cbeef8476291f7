"""ddpctl's help, start-up time, versions and init, and its output to a disk, a pipe or a terminal that ends."""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from platform import python_version

import pytest
import yaml
from tests.in_process import ddpctl as in_process
from tests.in_process import verbs
from tests.unit.ddpctl.test_run_store import make

from ddpctl import main

DDPCTL = (sys.executable, "-m", "ddpctl")
VERBS = (
    "launch", "render", "ps", "status", "logs", "explain", "profile", "stop", "top", "report", "timeline", "rm",
    "attach", "exec", "shell", "suspend", "resume", "pull", "export", "hosts", "bench", "doctor", "rehearse",
    "provision", "init", "schema", "version", "image", "monitor",
)  # fmt: skip


def cpu_seconds(*argv: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick() -> None:
    """At most twice the CPU time of importing typer alone, each the best of five, one after the other."""
    spent = [(cpu_seconds(*DDPCTL, "--help"), cpu_seconds(sys.executable, "-c", "import typer")) for _ in range(5)]
    help_s, typer_s = map(min, zip(*spent, strict=True))
    assert help_s < 2 * typer_s, spent


@functools.cache
def imported() -> dict[str, list[str]]:
    """By verb: what is imported after its help and that of the verbs before it, in one process for all."""
    code = """
import json, sys
from ddpctl.main import app
found = {}
for verb in sys.argv[1:]:
    assert app(args=[*verb.split(), "--help"], prog_name="ddpctl", standalone_mode=False) == 0
    found[verb] = list({name.partition(".")[0] for name in sys.modules})
print(json.dumps(found), file=sys.stderr)
"""
    line = [sys.executable, "-c", code, "", *VERBS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    modules: dict[str, list[str]] = json.loads(done.stderr)
    return modules


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb: str) -> None:
    """Typer itself imports pydantic for a verb that takes a list; the list of verbs needs neither."""
    assert "typer" in imported()[verb]
    heavy = {"torch", "fabric", "yaml", "rich", "numpy"} | (set() if verb else {"pydantic"})
    assert heavy & set(imported()[verb]) == set()


def test_every_verb_is_in_the_help_with_its_first_sentence() -> None:
    lines = in_process("--help").stdout.splitlines()
    listed = tuple(line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line.strip())
    assert listed == VERBS
    assert not [line for line in lines[1:] if line.endswith("...")], "a verb's first sentence is too long for the list"
    sentences = {name: verb.get_short_help_str(120) for name, verb in verbs().items()}
    assert sentences == {name: text for name, (_, text) in main.VERBS.items()}


def test_version_prints_the_versions_of_python_and_torch() -> None:
    assert in_process("version").stdout == (
        f"ddpctl {metadata.version('ddpctl')}\npython {python_version()}\n"
        f"torch {metadata.version('torch')}\ntorchvision {metadata.version('torchvision')}\n"
    )


def test_init_writes_a_file_that_launch_takes(tmp_path: Path) -> None:
    done = in_process("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "ddpctl.yaml" in done.stderr
    text = (tmp_path / "ddpctl.yaml").read_text()
    assert "for this machine: no GPU, " in text
    rendered = in_process("render", cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    document = yaml.safe_load(re.sub(r"^  # (?=boxes|hpc|cluster|t4s|  )", "  ", text, flags=re.M))
    assert {name: target["kind"] for name, target in document["targets"].items()} == {
        "here": "local", "boxes": "ssh", "hpc": "slurm", "cluster": "kubernetes", "t4s": "kaggle"
    }  # fmt: skip
    (tmp_path / "all.yaml").write_text(re.sub(r"^  # (?=boxes|hpc|cluster|t4s|  )", "  ", text, flags=re.M))
    assert in_process("render", "-f", "all.yaml", cwd=tmp_path).returncode == 0
    again = in_process("init", cwd=tmp_path)
    assert again.returncode == 2
    assert ("ddpctl.yaml" in again.stderr, "--force" in again.stderr) == (True, True)
    assert (tmp_path / "ddpctl.yaml").read_text() == text


SAFE_DDPCTL = (sys.executable, "-P", "-m", "ddpctl")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs, of which one has a log."""
    run = make(tmp_path / "runs", "night", 1.0)
    node = Path(run.folder) / "node-0"
    node.mkdir()
    (node / "node.log").write_text("a line\n")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "runs"))
    return tmp_path


PRINTING_VERBS = (("ps",), ("logs",), ("top", "--once"))


@pytest.mark.parametrize("verb", PRINTING_VERBS, ids=" ".join)
def test_a_full_disk_is_one_line_and_73_and_a_closed_pipe_no_failure(root: Path, verb: tuple[str, ...]) -> None:
    def ended(stdout: int) -> tuple[int, str]:
        done = subprocess.run([*SAFE_DDPCTL, *verb], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
        os.close(stdout)
        return done.returncode, done.stderr

    code, message = ended(os.open("/dev/full", os.O_WRONLY))
    assert (code, message.count("\n"), "No space left on device" in message) == (73, 1, True)
    reading, writing = os.pipe()
    os.close(reading)
    assert ended(writing) == (0, "")


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_ctrl_c_at_the_beginning_is_silent(root: Path, module: str) -> None:
    (root / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    process = subprocess.Popen(
        [*SAFE_DDPCTL, "top", "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)
