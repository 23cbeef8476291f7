"""Scripts of examples/ as their users start them: unmodified under ddprun, or beside it."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 180


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, real_programs: None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def ddprun(run_dir: Path, *args: str) -> subprocess.Popen[str]:
    command = ["-m", "ddprun", "--run-id", run_dir.name, "--run-dir", str(run_dir), *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return forks.start(command, env=os.environ, **pipes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def epochs_of(output: str, world_size: int) -> list[tuple[int, int]]:
    """Return (rank, epoch) of every line that says that one ended."""
    lines = re.findall(rf"rank (\d) of {world_size}: epoch (\d)/2 loss \d", output)
    return sorted((int(rank), int(epoch)) for rank, epoch in lines)


def test_a_script_may_spawn_its_ranks_and_choose_their_address(tmp_path: Path) -> None:
    process = ddprun(tmp_path / "runs" / "spawn", str(EXAMPLES / "mp_spawn.py"))
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, epochs_of(output, 2)) == (0, [(0, 1), (0, 2), (1, 1), (1, 2)]), output


def test_four_ranks_start_by_hand() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    script = [str(EXAMPLES / "by_hand.py"), "--world_size", "4", "--init_method", address]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [forks.start([*script, "--rank", str(rank)], env=env, stdout=-1, text=True) for rank in range(4)]
    output = "".join(rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert epochs_of(output, 4) == [(rank, epoch) for rank in range(4) for epoch in (1, 2)]


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_ranks_get_their_place_on_the_command_line(tmp_path: Path, method: str) -> None:
    address = f"file://{tmp_path}/meet" if method == "file" else "tcp://$MASTER_ADDR:$MASTER_PORT"
    place = f"--rank $RANK --world_size $WORLD_SIZE --init_method {address}"
    line = f"exec {sys.executable} {EXAMPLES / 'by_hand.py'} {place}"
    options = ("--nproc-per-node", "2", "--no-python", "/bin/sh", "-c", line)
    process = ddprun(tmp_path / "runs" / "hand", *options)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, epochs_of(output, 2)) == (0, [(0, 1), (0, 2), (1, 1), (1, 2)]), output


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("fsdp", 2, [r"rank 0: steps 1 to 60, 737 parameters", r"rank 1: steps 1 to 60, 672 parameters"]),
        ("tensor_parallel", 2, [r"rank 0 of 2: 705 of 1409 parameters, loss (\S+)\n[^|]*one process: loss \1\n"]),
        (
            "pipeline",
            2,
            [r"rank 0 of 2: stage of 420 parameters", r"rank 1 of 2: stage of 21 parameters, loss 1\.\d+ to 0"],
        ),
        ("rpc", 3, [r"rank 0: 60 gradients of 2 ranks, error 0\.[0-4]"]),
    ],
)
def test_an_example_of_another_parallelism_runs(tmp_path: Path, name: str, ranks: int, expected: list[str]) -> None:
    process = ddprun(tmp_path / "runs" / name, "--nproc-per-node", str(ranks), str(EXAMPLES / f"{name}.py"))
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert [pattern for pattern in expected if not re.search(pattern, output)] == []
    if name == "fsdp":  # the same command continues from its snapshot
        again = ddprun(tmp_path / "runs" / name, "--nproc-per-node", "2", str(EXAMPLES / "fsdp.py"), "70")
        output, _ = again.communicate(timeout=TIMEOUT_S)
        assert (again.returncode, len(re.findall("steps 61 to 70", output))) == (0, 2), output


EACH_LOADS_ITS_OWN = """
import ddpwire.script as ddp
import torch.distributed as dist

dist.init_process_group("gloo")
first = 20 if (ddp.checkpoint_dir() / "snapshot.pt").exists() else 0
for step in range(first + 1, first + 4):
    ddp.progress(step)
    ddp.should_stop()
dist.barrier()
"""


def test_nodes_that_do_not_share_a_folder_resume_from_rank_0s_checkpoint(tmp_path: Path) -> None:
    """Each node has a run folder of its own, and so a folder for checkpoints of its own, as on SSH machines."""

    def run(script: str, *arguments: str) -> str:
        port = str(free_port())
        nodes = [
            ddprun(
                tmp_path / f"node-{node}" / "run",
                *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
                *("--master-addr", "127.0.0.1", "--master-port", port, script, *arguments),
            )
            for node in (0, 1)
        ]
        outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
        return "".join(outputs)

    loop = str(EXAMPLES / "loop_after.py")
    run(loop, "--epochs", "1")
    assert [bool(list(tmp_path.glob(f"node-{node}/**/snapshot.pt"))) for node in (0, 1)] == [True, False]
    output = run(loop, "--epochs", "2")
    assert sorted(re.findall(r"rank (\d) continues after step (\d+)", output)) == [("0", "20"), ("1", "20")], output
    assert "different steps" not in output

    script = tmp_path / "own.py"
    script.write_text(EACH_LOADS_ITS_OWN)
    assert "the ranks start with different steps, 1 to 21: have they loaded" in run(str(script))
