"""What one ddprun tells its ranks, and what it says of them: lines, messages, metrics, refusals."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from ddpwire.machine import usable_cores

SCRIPTS = Path(__file__).parent / "scripts"


def test_the_last_lines_of_the_rank_that_failed_are_not_shown_twice(runs):
    node = runs.start("act.py", "1=3", options=("--nproc-per-node", "2"))
    assert node.end() == 3
    assert "[node0 rank1] ready" in node.stdout.read_text().splitlines()
    assert (node.outcome().cause, node.outcome().node, node.outcome().rank) == ("error", 0, 1)
    assert len(node.messages()) == 2
    assert "RUN/node-0/rank-1.log" in node.messages()[-1]


def test_what_a_rank_is_told_and_every_line_it_says(runs, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("DDP_DEVICE", "cpu")
    monkeypatch.setenv("DDP_NODES_HERE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = runs.start("say.py", "--epochs", "3")
    assert node.end() == 0
    for rank in (0, 1):
        first, *rest = node.log(rank).split("\n")
        told = json.loads(first)
        assert told["argv"] == ["--epochs", "3"]
        assert told["path"] == str(SCRIPTS)
        assert told["name"] == "__main__"
        env = told["env"]
        port, threads = env.pop("MASTER_PORT"), env.pop("OMP_NUM_THREADS")
        assert int(port) > 0
        assert re.fullmatch("[0-9a-f]{32}", env.pop("TORCHELASTIC_RUN_ID"))
        assert int(threads) == max(1, usable_cores() // 4)
        lost = dict(pair.split("=") for pair in env.pop("DDP_LOST_BEFORE").split(","))
        assert {cause: float(seconds) > 0 for cause, seconds in lost.items()} == {"rendezvous": True, "at": True}
        ours = {key: value for key, value in env.items() if key.startswith(WORDS)}
        assert ours == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "1000",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(node.folder / f"rank-{rank}.error.json"),
            "DDP_RUN_ID": "none",
            "DDP_RUN_DIR": str(runs.run_dir),
            "DDP_CHECKPOINT_DIR": str(runs.run_dir / "checkpoints"),
            "DDP_DEVICE": "cpu",
            "DDP_ATTEMPT": "1",
            "DDP_HEARTBEAT_FILE": str(node.folder / "heartbeat" / f"rank-{rank}"),
            "DDP_EVENTS_FILE": str(node.folder / "events.jsonl"),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
            "PROMETHEUS_MULTIPROC_DIR": str(node.folder / "metrics" / f"rank-{rank}"),
        }
        lines = ["a line in two parts", "x" * 200_000, *(f"line {n}" for n in range(2_000)), "no newline at the end"]
        assert sorted(rest) == sorted(lines)
        said = [line for line in node.stdout.read_text().splitlines() if line.startswith(f"[node0 rank{rank}] line")]
        assert said == [f"[node0 rank{rank}] line {number}" for number in range(2_000)]


WORDS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "NODE_RANK", "MASTER_", "ROLE_"),
    *("TORCHELASTIC_", "DDP_", "PET_", "GLOO_", "NCCL_", "PROMETHEUS_", "TORCH_CPP", "CUDA_DEVICE"),
)


def test_without_a_folder_a_success_leaves_none(tmp_path):
    command = [sys.executable, "-m", "ddprun", "--no-python", "/bin/sh", "-c", "echo hello from $RANK"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "hello from 0\n")
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_cannot_be_started(runs):
    node = runs.start("nothing.sh", options=("--no-python",))
    assert node.end() == 127
    assert f"{SCRIPTS}/nothing.sh: {os.strerror(errno.ENOENT)}" in node.log(0)


def test_a_taken_port_names_its_holder(runs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = runs.start("act.py", nodes="2", port=port)
        assert node.end() == 69
    holder = f"pid {os.getpid()} ({' '.join(psutil.Process().cmdline())[:80]})"
    lines = "\n".join(node.messages())
    assert holder in lines
    assert f"port {port} on 127.0.0.1" in lines


def test_a_folder_that_is_in_use_is_refused(runs):
    first = runs.start("act.py", "all=save")
    runs.wait_until_ready(first)
    second = runs.start("act.py", "all=save")
    assert second.end() == 78
    (message,) = second.messages()
    assert "RUN/node-0" in message
    first.process.terminate()
    assert first.end() == 143


OWNER = {"DDP_USER": "ann", "DDP_PROJECT": "vision"}


def test_the_metrics_of_both_ranks_and_over_a_restart(runs):
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "my-run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        node = runs.start("metrics.py", options=options, env={"DDP_METRICS_PORT": str(taken), **OWNER})
        runs.until(lambda: node.log(0).count("ready") == 2 and node.log(1).count("ready") == 1)
    free = node.state().metrics.removesuffix("/metrics").rpartition(":")[2]
    assert f"port {taken}" in node.messages()[0]
    assert free in node.messages()[0]
    with urllib.request.urlopen(node.state().metrics, timeout=5) as answer:  # noqa: S310
        text = answer.read().decode()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert series['ddp_steps_total{rank="0"}'] == "20.0"
    assert series['ddp_steps_total{rank="1"}'] == "20.0"
    assert series['ddp_last_step{rank="0"}'] == "8.0"
    assert series['ddp_last_step{rank="1"}'] == "0.0"
    assert series['my_seconds_bucket{le="2.0",rank="0"}'] == "2.0"
    assert series['ddp_rank_exits_total{cause="sigkill"}'] == "1.0"
    assert series['ddp_rank_exits_total{cause="ok"}'] == "0.0"
    assert series['ddp_job_state{state="training"}'] == "1.0"
    assert series["ddp_world_size"] == "2.0"
    (about,) = (name for name in series if name.startswith("ddp_run_info"))
    uid = node.state().run_uid
    assert re.fullmatch(
        rf'ddp_run_info\{{config_sha256="[0-9a-f]{{12}}",project="vision",run_id="my-run",run_uid="{uid}",user="ann"\}}',
        about,
    )
    assert re.fullmatch("[0-9a-f]{12}", uid)
    assert series["ddp_ranks_done"] == "0.0"
    assert "# HELP ddp_steps_total Optimizer steps taken." in text.splitlines()
    assert [line for line in text.splitlines() if "_created" in line or "pid=" in line] == []
    if Path(PROMTOOL).exists():
        check = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")
    node.process.terminate()
    assert node.end() == 143


PROMTOOL = "/usr/bin/promtool"


def test_the_message_has_the_error_of_the_script(runs):
    node = runs.start("raise.py")
    assert node.end() == 1
    assert (node.outcome().cause, node.outcome().node, node.outcome().rank) == ("error", 0, 0)
    assert "ValueError: bad label 17" in node.outcome().message


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"DDP_LIFELINE_FD": "77"}, id="lifeline"),
        pytest.param({"DDP_METRICS_PORT": "abc"}, id="metrics-port"),
        pytest.param({"PET_NPROC_PER_NODE": "9" * 5000}, id="nproc"),
    ],
)
def test_a_refused_node_writes_an_outcome(runs, env):
    runs.run_dir.mkdir(exist_ok=True)
    node = runs.start("act.py", env={"PET_NODE_RANK": "0"} | env)
    assert node.end() == 78
    assert (node.outcome().code, node.outcome().cause) == (78, "config")
    assert node.messages() == [f"ddprun: {node.outcome().message}"]
    assert next(iter(env)) in node.outcome().message
    assert len(node.outcome().message) < 200
