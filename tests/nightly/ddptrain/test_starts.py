"""Every way to start ranks trains the same model: ddprun, torchrun, mp.spawn, by hand, one plain process.

What a test starts itself is a fork (tests/forks.py). The ranks of torchrun and mp.spawn are executed.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import forks
from tests.messages import assert_names

from ddpwire.run_files import read_node, read_outcome

TINY = (
    "--data=synthetic",
    "--synthetic-samples=48",
    "--synthetic-shape=3x16x16",
    "--model=convnet",
    "--norm=group",
    "--bucket-mb=0.01",  # several buckets on three ranks: the weights tell the order in which gradients are added
    "--batch-size=24",
    "--epochs=2",
    "--deterministic",
)
SIZE = 3
Train = Callable[..., list]


def ended(command: list[str], cwd: Path) -> str:
    """The stdout of a launcher that succeeds."""
    done = forks.run([*command, *TINY], cwd=cwd, env=os.environ, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def fingerprint(output: str) -> str:
    assert f"world size     {SIZE}" in output
    return re.findall(r"weights sha256 ([0-9a-f]{16})", output)[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of three ranks under torchrun."""
    port = str(free_port())
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={SIZE}", f"--master-port={port}", "-m", "ddptrain"]
    return fingerprint(ended(command, tmp_path_factory.mktemp("torchrun")))


def test_ddprun(expected: str, tmp_path: Path) -> None:
    assert fingerprint(ended(["-m", "ddprun", f"--nproc-per-node={SIZE}", "-m", "ddptrain"], tmp_path)) == expected


def test_spawn(expected: str, tmp_path: Path) -> None:
    assert fingerprint(ended(["-m", "ddptrain", f"--spawn={SIZE}"], tmp_path)) == expected


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_by_hand(expected: str, method: str, tmp_path: Path) -> None:
    where = f"tcp://127.0.0.1:{free_port()}" if method == "tcp" else f"file://{tmp_path / 'meet'}"
    ranks = [
        forks.start(
            ["-m", "ddptrain", *TINY, f"--rank={rank}", f"--world-size={SIZE}", f"--init-method={where}"],
            cwd=tmp_path,
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * SIZE
    lines = "".join(err for _, err in outs).splitlines()
    assert [line for line in lines if "for the other ranks at" not in line] == []  # on a busy machine it may wait
    assert fingerprint(outs[0][0]) == expected
    assert [out for out, _ in outs[1:]] == [""] * (SIZE - 1)


def test_the_environment_alone(expected: str, train: Train) -> None:
    assert train(*TINY, size=SIZE)[0].fingerprint == expected


@pytest.mark.parametrize("strategy", ["ddp", "dp", "single"])
def test_one_plain_process(strategy: str, tmp_path: Path) -> None:
    output = ended(["-m", "ddptrain", f"--strategy={strategy}"], tmp_path)
    assert "world size     1" in output


def test_a_master_that_no_name_server_knows(train: Train) -> None:
    environ = {"MASTER_ADDR": "nowhere.invalid"}
    ended = train("--timeout=1", size=2, environ=environ)
    for rank in ended:
        reason = rank.err.partition("; ")[0].rpartition(": ")[2]  # the resolver's
        assert rank.code == 69
        assert_names(rank.err.replace(f": {reason}; ", ": REASON; "), "2", "MASTER_ADDR", "1", "--timeout")


def test_a_master_where_nobody_listens() -> None:
    """One line after ten seconds, and one at the end, without torch's stacks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank_info = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ = {**os.environ, **rank_info, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = forks.run(["-m", "ddptrain", "--timeout=12"], env=environ, text=True, timeout=120)
    first, last = done.stderr.splitlines()
    assert_names(first, "rank 1", "--timeout", "127.0.0.1", port)
    last, reason = last.split(f":{port}: ")
    assert reason
    assert_names(last, "rank 1", "--timeout", "127.0.0.1")
    assert (done.returncode, done.stdout) == (142, "")


def test_mpi_is_refused_where_torch_has_none(train: Train) -> None:
    ended = train("--backend=mpi", size=2)
    assert [(rank.code, rank.out) for rank in ended] == [(78, "")] * 2
    assert ended[1].err == ""
    assert_names(ended[0].err, "--backend")


def spawned(cwd: Path) -> subprocess.Popen[str]:
    """Two ranks that train, in their second epoch."""
    process = forks.start(
        ["-m", "ddptrain", "--spawn=2", "--epochs=300"],
        cwd=cwd,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("epoch  2/300"):
        assert line, process.communicate()
    return process


def test_a_signal_to_the_process_that_spawned_saves_on_all_ranks(tmp_path: Path) -> None:
    process = spawned(tmp_path)
    try:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert (process.returncode, err) == (143, "")
    assert_names(re.sub(r"(?<=step[ -])\d+", "N", out.splitlines()[-1]), "SIGTERM", "13500", "checkpoints/step-N.pt")
    assert list((tmp_path / "checkpoints").glob("step-*.pt"))


def test_a_signal_to_one_rank_is_reported_as_a_stop_of_that_rank(tmp_path: Path) -> None:
    command = ["-m", "ddprun", "--nproc-per-node=2", f"--run-dir={tmp_path}", "-m", "ddptrain", "--epochs=300"]
    with (tmp_path / "out").open("w") as out:
        process = forks.start(command, cwd=tmp_path, env=os.environ, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 240
        while "epoch  1/300" not in (tmp_path / "out").read_text():
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = read_node((tmp_path / "node-0/node.json").read_text()).ranks
        os.kill(next(rank.pid for rank in ranks if rank.rank == 1), signal.SIGTERM)
        assert process.wait(90) == 143
    finally:
        process.kill()
    stopped, output = (tmp_path / "out").read_text().splitlines()[-2:]
    assert_names(re.sub(r"(?<=step[ -])\d+", "N", stopped), "SIGTERM", "rank 1", "13500", "step-N.pt")
    assert_names(output, "rank 1", "SIGTERM", "143", "node 0", "node-0")
    outcome = read_outcome((tmp_path / "node-0/outcome.json").read_text())
    assert (outcome.cause, outcome.rank, outcome.retry) == ("stopped", 1, True)
    assert outcome.message in output


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_a_terminal_that_is_closed_stops_a_training_saved(terminal: str, tmp_path: Path) -> None:
    terminal_fd, end_fd = os.openpty()
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import fcntl, os, sys, termios\n"
                "fcntl.ioctl(1, termios.TIOCSCTTY)\n"  # ours, whose SIGHUP comes when it is closed
                "os.execv(sys.executable, [sys.executable, '-m', 'ddptrain', '--epochs=300'])",
            ],
            cwd=tmp_path,
            env=os.environ | {"TERM": terminal},
            stdout=end_fd,
            stderr=err,
            start_new_session=True,
        )
    os.close(end_fd)
    output = b""
    try:
        while b"epoch  1/300" not in output:
            output += os.read(terminal_fd, 4096)
        os.close(terminal_fd)
        assert process.wait(90) == 143
    finally:
        process.kill()
    assert (tmp_path / "err").read_text() in ("", "ddptrain: warning: stdout cannot be written: Input/output error\n")
    assert list((tmp_path / "checkpoints").glob("step-*.pt"))


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    process = spawned(tmp_path)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode in (137, 142), err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
