"""Bad input: one line that says what is wrong and what to do, the documented exit code, nothing left behind."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.road.driver import ddpctl

from ddpwire.folder import NODE_LOG


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A command line (and a ddpctl.yaml), and all that stderr must say. ``{tmp}`` is the test's folder."""

    args: str
    code: int
    says: str
    yaml: str = ""


def launch(yaml: str, says: str) -> Bad:
    return Bad(args="launch", yaml=yaml, code=78, says=says)


FLAG_NODES = "is not allowed: a number of nodes from 1, or MIN:MAX such as 1:4"
TABLE = {
    "unknown key": launch("job: {nodse: 2}", "ddpctl.yaml:1:7: 'nodse' is no key of a job; did you mean 'nodes'?"),
    "another's word": launch(
        "job: {replicas: 2}", "ddpctl.yaml:1:7: 'replicas' is no key of a job; did you mean 'nodes'?"
    ),
    "more nodes than hosts": launch(
        "job:\n  nodes: 2\ntarget: boxes\ntargets:\n  boxes: {kind: ssh, hosts: [a]}",
        "ddpctl.yaml:2:10: nodes: 2, but the target has 1 host: ask for fewer nodes, or add hosts",
    ),
    "--nodes above the hosts": Bad(
        args="launch --nodes 3 -t ssh",
        yaml="targets:\n  boxes: {kind: ssh, hosts: [a, b]}",
        code=2,
        says="ddpctl: --nodes: 3, but the target has 2 hosts: ask for fewer nodes, or add hosts",
    ),
    "wrong type": launch("job:\n  gpus: two", "ddpctl.yaml:2:9: gpus: 'two' is no whole number"),
    "duplicate key": launch("job:\n  gpus: 1\n  gpus: 2", "ddpctl.yaml:3:3: 'gpus' is there twice, first in line 2"),
    "base 60": launch(
        "job:\n  grace: 12:30:45",
        "ddpctl.yaml:2:10: grace: 12:30:45 would be 45045 to YAML (base 60); write the number",
    ),
    "a key of no job": launch(
        "job:\n  time: 12:30:45",
        "ddpctl.yaml:2:3: 'time' is no key of a job; did you mean 'time_limit'?",
    ),
    "octal": launch("job:\n  gpus: 010", "ddpctl.yaml:2:9: gpus: 010 may be base 8 to YAML; write 10"),
    "nodes 0": launch("job:\n  nodes: 0", f"ddpctl.yaml:2:10: nodes: '0' {FLAG_NODES}"),
    "two errors": launch(
        "job:\n  nodes: 0\n  gpus: 99",
        f"ddpctl.yaml:2:10: nodes: '0' {FLAG_NODES}\nddpctl.yaml:3:9: gpus: 99 is too large: from 1 to 64",
    ),
    "corrupt YAML": launch(
        "job: [1,", "ddpctl.yaml:1:9: not YAML: expected the node content, but found '<stream end>'"
    ),
    "not UTF-8": launch("job: \xff", "ddpctl.yaml:1:6: the byte 0xff is not UTF-8"),
    "unknown kind": launch(
        "targets:\n  hpc: {kind: slrum}", "ddpctl.yaml:2:15: kind: 'slrum' is no kind of target; did you mean 'slurm'?"
    ),
    "a Python without torch": Bad(
        args="launch --target old",
        yaml="targets:\n  old: {kind: local, python: /usr/bin/no-python3}",
        code=69,
        says="ddpctl: cannot run /usr/bin/no-python3: /usr/bin/no-python3: not found: "
        "set the target's 'python' to one with torch",
    ),
    "--nodes 0": Bad(args="launch --nodes 0", code=2, says=f"ddpctl: --nodes: '0' {FLAG_NODES}"),
    "--nodes 3:2": Bad(args="launch --nodes 3:2", code=2, says=f"ddpctl: --nodes: '3:2' {FLAG_NODES}"),
    "--gpus two": Bad(args="launch --gpus two", code=2, says="ddpctl: --gpus: 'two' is no whole number"),
    "--gpus 65": Bad(args="launch --gpus 65", code=2, says="ddpctl: --gpus: 65 is too large: from 1 to 64"),
    "--device tpu": Bad(args="launch --device tpu", code=2, says="ddpctl: --device: 'tpu' is none of auto, cuda, cpu"),
    "--device cuda": Bad(
        args="launch --device cuda",
        code=78,
        says="ddpctl: --device cuda: 1 node x 1 GPU: 1 needed, this machine has none: "
        "ask for fewer, or --device cpu for CPU ranks",
    ),
    "no such script": Bad(args="launch -- no.py", code=66, says="ddpctl: no.py: no such script in {tmp}"),
    "no such file": Bad(args="launch -f no.yaml", code=66, says="ddpctl: no.yaml: there is no such file"),
    "a folder as file": Bad(args="launch -f .", code=66, says="ddpctl: .: not a regular file"),
    "unknown target": Bad(
        args="launch -t hpc",
        code=2,
        says="ddpctl: --target: 'hpc' is no target; there are: local, slurm, kubernetes, kaggle",
    ),
    "unknown profile": Bad(
        args="launch -p quick", code=2, says="ddpctl: --profile: 'quick' is no profile; there is none"
    ),
    "--env without =": Bad(args="launch -e A", code=2, says="ddpctl: --env: 'A' has no value: write --env A=VALUE"),
    "--env no name": Bad(
        args="launch -e 1A=b",
        code=2,
        says="ddpctl: --env: '1A' is no name of a variable: letters, digits and '_', no digit first",
    ),
    "--name": Bad(
        args="launch --name A_b",
        code=2,
        says="ddpctl: --name: 'A_b' is no name: lower-case letters, digits and '-', a letter first, at most 40",
    ),
    "unknown flag": Bad(
        args="launch --gpu 2",
        code=2,
        says="ddpctl: No such option: --gpu (Possible options: --gpus) (ddpctl launch --help lists the options, "
        "and what is your program's own goes after --)",
    ),
    "unknown verb": Bad(
        args="lunch",
        code=2,
        says="ddpctl: No such command 'lunch'. Did you mean 'launch'? (ddpctl --help lists the options)",
    ),
    "no run yet": Bad(args="status x", code=66, says="ddpctl: no run yet in {tmp}/runs: start one with ddpctl launch"),
    "resume nothing": Bad(
        args="launch --resume x", code=66, says="ddpctl: no run yet in {tmp}/runs: start one with ddpctl launch"
    ),
    **{
        f"a spec for {kind} without its script": Bad(
            args=f"render -t {kind} -- no.py", code=66, says="ddpctl: no.py: no such script in {tmp}"
        )
        for kind in ("local", "slurm", "kubernetes")
    },
    "an inventory that is a device": Bad(
        args="provision --inventory /dev/null", code=66, says="ddpctl: --inventory: /dev/null is no file"
    ),
    "an inventory that is not there": Bad(
        args="provision --inventory no.yaml", code=66, says="ddpctl: --inventory: no.yaml is not there"
    ),
    "stop what": Bad(args="stop", code=2, says="ddpctl: stop: name a run, or --all (ddpctl ps lists them)"),
}


@pytest.mark.parametrize("bad", TABLE.values(), ids=TABLE.keys())
def test_bad_input(bad: Bad, tmp_path: Path) -> None:
    if bad.yaml:
        (tmp_path / "ddpctl.yaml").write_bytes(bad.yaml.encode("latin-1"))
    done = ddpctl(*bad.args.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (bad.code, "", bad.says.format(tmp=tmp_path) + "\n")
    assert [path.name for path in tmp_path.glob("runs/*")] == []


def test_a_dry_run_without_its_script(tmp_path: Path) -> None:
    done = ddpctl("launch", "--dry-run", "--", "no.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (66, f"ddpctl: no.py: no such script in {tmp_path}\n")


@pytest.mark.parametrize("verb", ["rm", "status", "logs"])
def test_an_empty_name_is_no_runs_beginning(verb: str, tmp_path: Path) -> None:
    done = ddpctl(verb, "", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        66,
        "",
        "ddpctl: a run's name is not empty: name a run (ddpctl ps lists them)\n",
    )


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
        done = ddpctl("render", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_secret_among_the_variables_is_told(tmp_path: Path) -> None:
    (tmp_path / "ddpctl.yaml").write_text("job: {env: {WANDB_API_KEY: abc, EMPTY_TOKEN: '', MONKEY: a}}\n")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--env", "db_password=x", "--env", "TOKEN=abc", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[0] == (
            "ddpctl: env: the value of WANDB_API_KEY, db_password, TOKEN stands in specs and records as it is: "
            "secrets: [WANDB_API_KEY, db_password, TOKEN] takes it from your environment and keeps it out of them"
        )


def test_a_secret_among_the_arguments_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for verb in (("render",), ("launch", "--dry-run")):
        done = ddpctl(*verb, "--", "train.py", "--hf-token", "abc", "--db.password=x", "--lr", "0.1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if line.startswith("ddpctl: ")] == [
            "ddpctl: the value of --hf-token, --db.password stands in specs, records and every machine's list of "
            "processes: secrets: [HF_TOKEN, DB_PASSWORD] takes it from your environment, where the script can read it, "
            "and keeps it out of them"
        ]


def test_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi's own answer on a machine with two GPUs, from a stand-in: this machine may have none."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho GPU-5a1e\necho GPU-77c0\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    done = ddpctl("launch", "--nodes", "2", "--gpus", "4", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        78,
        "ddpctl: 2 nodes x 4 GPUs: 8 needed, this machine has 2: ask for fewer, or --device cpu for CPU ranks\n",
    )


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = ddpctl("launch", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 69
    assert done.stderr.startswith(f"ddpctl: port {port} on 127.0.0.1 cannot be had: address already in use by pid ")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.glob("runs/*")] == []


def test_a_name_that_is_taken_and_a_folder_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/exp").mkdir(parents=True)
    done = ddpctl("launch", "--name", "exp", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "ddpctl: --name: a run named exp is there already: choose another name, "
        "or go on from its last checkpoint with --resume exp\n",
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "file"))
    done = ddpctl("launch", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        73,
        f"ddpctl: cannot keep runs in {tmp_path}/file: a file is in the way\n",
    )


def no_data(tmp_path: Path) -> str:
    return f"--data mnist --data-dir {tmp_path}/data"


def file_as_checkpoint_dir(tmp_path: Path) -> str:
    (tmp_path / "ckpt").write_text("")
    return f"--checkpoint-dir {tmp_path}/ckpt"


def corrupt_checkpoint(tmp_path: Path) -> str:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/step-00000010.pt").write_bytes(b"torn")
    return f"--checkpoint-dir {tmp_path}/ckpt"


@pytest.mark.parametrize(
    ("prepare", "code"),
    [(no_data, 66), (file_as_checkpoint_dir, 73), (corrupt_checkpoint, 65), (lambda _: "--bogus", 2)],
)
def test_what_the_trainer_refuses_is_said_once(prepare: Callable[[Path], str], code: int, tmp_path: Path) -> None:
    """Two ranks see the same error: it is told once, without a traceback, and is the run's exit code."""
    done = ddpctl("launch", "--gpus", "2", "--name", "refused", "--", *prepare(tmp_path).split())
    assert done.returncode == code, done.stdout + done.stderr
    log = (tmp_path / "runs/refused/node-0" / NODE_LOG).read_text()
    said = [
        line
        for line in log.splitlines()
        if "] ddptrain: " in line and " said: " not in line and " warning: " not in line
    ]
    assert len(said) == 1, log
    assert "Traceback" not in log + done.stderr
    assert f"run refused failed, exit code {code}, after " in done.stderr
