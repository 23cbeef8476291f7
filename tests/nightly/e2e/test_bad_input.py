"""More rows of bad input than tests/e2e/test_bad_input.py has, secrets in plain sight, and what is not refused."""

import os
import re
import socket
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl, outcome_of
from tests.e2e.test_bad_input import Bad, check_bad_input
from tests.in_process import ddpctl as in_process

from ddpwire.run_files import NODE_LOG

FILE = "ddpctl.yaml"
TABLE = {
    "another's word": Bad(yaml="job: {replicas: 2}", code=78, names=(f"{FILE}:1:7:", "'replicas'", "'nodes'")),
    "--nodes above the hosts": Bad(
        args="launch --nodes 3 -t ssh", yaml="targets:\n  boxes: {kind: ssh, hosts: [a, b]}", code=2,
        names=("--nodes", "3", "2 hosts"),
    ),
    "a duplicate key": Bad(yaml="job:\n  gpus: 1\n  gpus: 2", code=78, names=(f"{FILE}:3:3:", "gpus", "line 2")),
    "base 60": Bad(yaml="job:\n  grace: 12:30:45", code=78, names=(f"{FILE}:2:10:", "grace", "'12:30:45'")),
    "a key of no job": Bad(yaml="job:\n  time: 12:30:45", code=78, names=(f"{FILE}:2:3:", "'time'", "'time_limit'")),
    "octal": Bad(yaml="job:\n  gpus: 010", code=78, names=(f"{FILE}:2:9:", "gpus", "'010'")),
    "nodes 0": Bad(yaml="job:\n  nodes: 0", code=78, names=(f"{FILE}:2:10:", "nodes", "'0'")),
    "an unknown kind": Bad(
        yaml="targets:\n  hpc: {kind: slrum}", code=78, names=(f"{FILE}:2:15:", "'slrum'", "'slurm'")
    ),
    "--nodes 0": Bad(args="launch --nodes 0", code=2, names=("--nodes", "'0'")),
    "--nodes 3:2": Bad(args="launch --nodes 3:2", code=2, names=("--nodes", "'3:2'")),
    "--gpus two": Bad(args="launch --gpus two", code=2, names=("--gpus", "'two'")),
    "--device tpu": Bad(args="launch --device tpu", code=2, names=("--device", "'tpu'", "cuda", "cpu")),
    "a missing module": Bad(args="launch -- -m gone.sub", code=66, names=("-m gone",)),
    "a folder as file": Bad(args="launch -f .", code=66, names=("ddpctl: .:",)),
    "an unknown profile": Bad(args="launch -p quick", code=2, names=("--profile", "'quick'")),
    "--env without =": Bad(args="launch -e A", code=2, names=("--env", "'A'")),
    "--env no name": Bad(args="launch -e 1A=b", code=2, names=("--env", "'1A'")),
    "--name": Bad(args="launch --name A_b", code=2, names=("--name", "'A_b'")),
    "an unknown verb": Bad(args="lunch", code=2, names=("'lunch'", "'launch'")),
    "resume nothing": Bad(args="launch --resume x", code=66, names=("/runs",)),
    **{
        f"a spec for {kind} without its script": Bad(args=f"render -t {kind} -- no.py", code=66, names=("no.py",))
        for kind in ("local", "kubernetes")
    },
    "an inventory that is a device": Bad(args="provision --inventory /dev/null", code=66, names=("/dev/null",)),
    "an inventory that is not there": Bad(args="provision --inventory no.yaml", code=66, names=("no.yaml",)),
    "stop without a run": Bad(args="stop", code=2, names=("--all",)),
}  # fmt: skip


@pytest.mark.parametrize("bad", TABLE.values(), ids=TABLE.keys())
def test_bad_input_is_named_and_starts_nothing(bad: Bad, tmp_path: Path) -> None:
    check_bad_input(bad, tmp_path)


def test_a_dry_run_without_its_script_is_refused(tmp_path: Path) -> None:
    done = in_process("launch", "--dry-run", "--", "no.py", cwd=tmp_path)
    assert (done.returncode, "no.py" in done.stderr) == (66, True)


@pytest.mark.parametrize("verb", ["rm", "status", "logs"])
def test_an_empty_name_is_no_runs_beginning(verb: str, tmp_path: Path) -> None:
    done = in_process(verb, "", cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (66, "", 1)


def test_a_spec_may_name_a_script_of_its_image(tmp_path: Path) -> None:
    (tmp_path / "ddpctl.yaml").write_text(
        "targets:\n  image: {kind: kubernetes, project: []}\n  slurm: {kind: slurm, runtime: apptainer}\n"
        "job: {image: train.sif}\n"
    )
    for arguments in (
        ("-t", "image", "--", "no.py"),
        ("-t", "kubernetes", "--", "/app/no.py"),
        ("-t", "slurm", "--", "/app/no.py"),
    ):
        done = in_process("render", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_secret_among_the_variables_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "ddpctl.yaml").write_text("job: {env: {WANDB_API_KEY: abc, EMPTY_TOKEN: '', MONKEY: a}}\n")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--env", "db_password=x", "--env", "TOKEN=abc", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        warning = done.stderr.splitlines()[0]
        assert [name for name in ("WANDB_API_KEY", "db_password", "TOKEN") if name not in warning] == []
        assert [name for name in ("EMPTY_TOKEN", "MONKEY", "abc") if name in warning] == []


def test_a_secret_among_the_arguments_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--", "train.py", "--hf-token", "abc", "--db.password=x", "--lr", "0.1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (warning,) = [line for line in done.stderr.splitlines() if line.startswith("ddpctl: ")]
        assert [
            name for name in ("--hf-token", "--db.password", "HF_TOKEN", "DB_PASSWORD") if name not in warning
        ] == []
        assert [name for name in ("--lr", "abc") if name in warning] == []


def test_more_gpus_than_there_are_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi's own answer on a machine with two GPUs, from a stand-in: this machine may have none."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho GPU-5a1e\necho GPU-77c0\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    done = ddpctl("launch", "--nodes", "2", "--gpus", "4", cwd=tmp_path)
    assert (done.returncode, "8 GPUs" in done.stderr, "has 2" in done.stderr) == (78, True, True)


def test_a_taken_name_and_a_file_as_state_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/exp").mkdir(parents=True)
    done = ddpctl("launch", "--name", "exp", cwd=tmp_path)
    assert (done.returncode, "--name" in done.stderr, "'exp'" in done.stderr) == (2, True, True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "file"))
    done = ddpctl("launch", cwd=tmp_path)
    assert (done.returncode, f"{tmp_path}/file" in done.stderr) == (73, True)


@pytest.mark.parametrize(
    ("option", "code"),
    [("--data=mnist --data-dir={}/data", 66), ("--checkpoint-dir={}/file", 73), ("--bogus", 2)],
    ids=["missing data", "a file as folder of the checkpoints", "an unknown option"],
)
def test_an_error_of_all_ranks_is_printed_once(option: str, code: int, tmp_path: Path) -> None:
    """Two ranks see the same error. It is the run's, and its code is the run's exit code."""
    (tmp_path / "file").write_text("")
    done = ddpctl("launch", "--gpus", "2", "--name", "refused", "--", *option.format(tmp_path).split())
    assert done.returncode == code, done.stdout + done.stderr
    log = (tmp_path / "runs/refused/node-0" / NODE_LOG).read_text()
    printed = re.findall(r"^\[node0 rank([01])\] ddptrain: (?!warning: )", log, re.MULTILINE)
    assert printed in ([], ["0"]), log  # none: rank 1 was the first to exit, and says the same in the last line
    outcome = outcome_of(tmp_path, "refused")
    assert (outcome.code, outcome.cause, outcome.node) == (code, "error", 0)
    assert option.partition("=")[2].partition(" ")[0].format(tmp_path) in outcome.message
    assert log.count(f"[node0] {outcome.message}") == 1
    assert "Traceback" not in log + done.stderr


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = in_process("launch", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 69
    assert re.search(rf"\b{port}\b.*\bpid {os.getpid()}\b", done.stderr), done.stderr
    assert [path.name for path in tmp_path.glob("runs/*")] == []
