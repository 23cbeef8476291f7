"""Bad input: one line that says what is wrong and what to do, the documented exit code, nothing left behind."""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl, end_of, outcome_of
from tests.in_process import ddpctl as in_process
from tests.wording import Wording

from ddpwire.run_files import NODE_LOG


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A command line, with a ddpctl.yaml, and its exit code."""

    args: str = "launch"
    code: int
    yaml: str = ""
    in_process: bool = True


TABLE = {
    "unknown key": Bad(yaml="job: {nodse: 2}", code=78),
    "another's word": Bad(yaml="job: {replicas: 2}", code=78),
    "more nodes than hosts": Bad(
        yaml="job:\n  nodes: 2\ntarget: boxes\ntargets:\n  boxes: {kind: ssh, hosts: [a]}", code=78
    ),
    "--nodes above the hosts": Bad(
        args="launch --nodes 3 -t ssh", yaml="targets:\n  boxes: {kind: ssh, hosts: [a, b]}", code=2
    ),
    "wrong type": Bad(yaml="job:\n  gpus: two", code=78),
    "duplicate key": Bad(yaml="job:\n  gpus: 1\n  gpus: 2", code=78),
    "base 60": Bad(yaml="job:\n  grace: 12:30:45", code=78),
    "a key of no job": Bad(yaml="job:\n  time: 12:30:45", code=78),
    "octal": Bad(yaml="job:\n  gpus: 010", code=78),
    "nodes 0": Bad(yaml="job:\n  nodes: 0", code=78),
    "two errors": Bad(yaml="job:\n  nodes: 0\n  gpus: 99", code=78),
    "corrupt YAML": Bad(yaml="job: [1,", code=78),
    "not UTF-8": Bad(yaml="job: \xff", code=78),
    "unknown kind": Bad(yaml="targets:\n  hpc: {kind: slrum}", code=78),
    "a Python without torch": Bad(
        args="launch --target old", yaml="targets:\n  old: {kind: local, python: /usr/bin/no-python3}", code=69
    ),
    "--nodes 0": Bad(args="launch --nodes 0", code=2),
    "--nodes 3:2": Bad(args="launch --nodes 3:2", code=2),
    "--gpus two": Bad(args="launch --gpus two", code=2),
    "--gpus 65": Bad(args="launch --gpus 65", code=2),
    "--device tpu": Bad(args="launch --device tpu", code=2),
    "--device cuda": Bad(args="launch --device cuda", code=78),
    "no such script": Bad(args="launch -- no.py", code=66),
    "no such module": Bad(args="launch -- -m gone.sub", code=66),
    "no such file": Bad(args="launch -f no.yaml", code=66),
    "a folder as file": Bad(args="launch -f .", code=66),
    "unknown target": Bad(args="launch -t hpc", code=2),
    "unknown profile": Bad(args="launch -p quick", code=2),
    "--env without =": Bad(args="launch -e A", code=2),
    "--env no name": Bad(args="launch -e 1A=b", code=2),
    "--name": Bad(args="launch --name A_b", code=2),
    "unknown flag": Bad(args="launch --gpu 2", code=2, in_process=False),
    "unknown verb": Bad(args="lunch", code=2, in_process=False),
    "no run yet": Bad(args="status x", code=66),
    "resume nothing": Bad(args="launch --resume x", code=66),
    **{
        f"a spec for {kind} without its script": Bad(args=f"render -t {kind} -- no.py", code=66)
        for kind in ("local", "slurm", "kubernetes")
    },
    "an inventory that is a device": Bad(args="provision --inventory /dev/null", code=66),
    "an inventory that is not there": Bad(args="provision --inventory no.yaml", code=66),
    "stop what": Bad(args="stop", code=2),
}


@pytest.mark.parametrize("bad", TABLE.values(), ids=TABLE.keys())
def test_bad_input(bad: Bad, tmp_path: Path, wording: Wording) -> None:
    if bad.yaml:
        (tmp_path / "ddpctl.yaml").write_bytes(bad.yaml.encode("latin-1"))
    done = (in_process if bad.in_process else ddpctl)(*bad.args.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (bad.code, "")
    assert [path.name for path in tmp_path.glob("runs/*")] == []
    wording(done.stderr)


def test_a_dry_run_without_its_script(tmp_path: Path, wording: Wording) -> None:
    done = ddpctl("launch", "--dry-run", "--", "no.py", cwd=tmp_path)
    assert done.returncode == 66
    wording(done.stderr)


@pytest.mark.parametrize("verb", ["rm", "status", "logs"])
def test_an_empty_name_is_no_runs_beginning(verb: str, tmp_path: Path, wording: Wording) -> None:
    done = ddpctl(verb, "", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (66, "")
    wording(done.stderr)


def test_a_spec_may_name_a_script_of_its_image(tmp_path: Path) -> None:
    (tmp_path / "ddpctl.yaml").write_text(
        "targets:\n  image: {kind: kubernetes, project: []}\n  slurm: {kind: slurm, runtime: apptainer}\n"
        "job: {image: train.sif}\n"
    )
    for words in (
        ("-t", "image", "--", "no.py"),
        ("-t", "kubernetes", "--", "/app/no.py"),
        ("-t", "slurm", "--", "/app/no.py"),
    ):
        done = in_process("render", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_secret_among_the_variables_is_reported(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "ddpctl.yaml").write_text("job: {env: {WANDB_API_KEY: abc, EMPTY_TOKEN: '', MONKEY: a}}\n")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--env", "db_password=x", "--env", "TOKEN=abc", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        wording(done.stderr.splitlines()[0])


def test_a_secret_among_the_arguments_is_reported(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "train.py").write_text("")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--", "train.py", "--hf-token", "abc", "--db.password=x", "--lr", "0.1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (warning,) = [line for line in done.stderr.splitlines() if line.startswith("ddpctl: ")]
        wording(warning)


def test_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    """nvidia-smi's own answer on a machine with two GPUs, from a stand-in: this machine may have none."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho GPU-5a1e\necho GPU-77c0\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    done = ddpctl("launch", "--nodes", "2", "--gpus", "4", cwd=tmp_path)
    assert done.returncode == 78
    wording(done.stderr)


def test_a_taken_port_names_its_holder(tmp_path: Path, wording: Wording) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = ddpctl("launch", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 69
    assert f" by pid {os.getpid()} " in done.stderr
    wording(re.sub(r"\(.*\)", "(COMMAND)", done.stderr), port=port, pid=os.getpid())
    assert [path.name for path in tmp_path.glob("runs/*")] == []


def test_a_name_that_is_taken_and_a_folder_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    (tmp_path / "runs/exp").mkdir(parents=True)
    done = ddpctl("launch", "--name", "exp", cwd=tmp_path)
    assert done.returncode == 2
    wording(done.stderr)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "file"))
    done = ddpctl("launch", cwd=tmp_path)
    assert done.returncode == 73
    wording(done.stderr)


def no_data(tmp_path: Path) -> str:
    return f"--data mnist --data-dir {tmp_path}/data"


def file_as_checkpoint_dir(tmp_path: Path) -> str:
    (tmp_path / "ckpt").write_text("")
    return f"--checkpoint-dir {tmp_path}/ckpt"


def corrupt_checkpoint(tmp_path: Path) -> str:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/step-00000010.pt").write_bytes(b"torn")
    return f"--checkpoint-dir {tmp_path}/ckpt"


def unknown_option(_: Path) -> str:
    return "--bogus"


@pytest.mark.parametrize(
    ("prepare", "code"), [(no_data, 66), (file_as_checkpoint_dir, 73), (corrupt_checkpoint, 65), (unknown_option, 2)]
)
def test_what_the_trainer_refuses_is_printed_once(
    prepare: Callable[[Path], str], code: int, tmp_path: Path, wording: Wording
) -> None:
    """Two ranks see the same error: it is printed once, without a traceback, and is the run's exit code."""
    done = ddpctl("launch", "--gpus", "2", "--name", "refused", "--", *prepare(tmp_path).split())
    assert done.returncode == code, done.stdout + done.stderr
    log = (tmp_path / "runs/refused/node-0" / NODE_LOG).read_text()
    printed = re.findall(r"^\[node0 rank([01])\] ddptrain: (?!warning: )", log, re.MULTILINE)
    assert printed in ([], ["0"]), log  # none: rank 1 was the first to exit, and says the same in the last line
    outcome = outcome_of(tmp_path, "refused")
    assert (outcome.code, outcome.cause, outcome.node) == (code, "error", 0)
    assert log.count(f"[node0] {outcome.message}") == 1
    assert "Traceback" not in log + done.stderr
    wording(end_of("refused", done.stderr))  # its reason is the log's last line
