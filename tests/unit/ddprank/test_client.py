"""The library for scripts, in real processes: who hears a signal, who agrees, what it costs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from tests import forks

from ddprank.heartbeat import Heart, read_beat
from ddprun.settings.node_config import STOP_SIGNALS
from ddpwire.events import read_events

LOOP = Path(__file__).parent / "scripts" / "loop.py"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the loop; it is gone at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start_loop(*options: str, **environ: str) -> subprocess.Popen[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environ
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        executed = "ranks" not in options  # which import torch
        started.append(forks.start([str(LOOP), *options], env=env, executed=executed, **pipes))
        return started[-1]

    yield start_loop
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize("number", [*STOP_SIGNALS.values(), signal.SIGINT])
def test_a_signal_is_answered_at_the_end_of_a_step(start: Start, number: int) -> None:
    process = start()
    wait_for(process, "training")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, "")
    assert re.fullmatch(r"stopped at \d+\nfinally ran\natexit ran\n", out)


def test_a_signal_before_the_loop_ends_the_process_at_once(start: Start) -> None:
    process = start("import")
    wait_for(process, "importing")
    asked_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 143
    assert time.monotonic() - asked_at < 20


OWN_HANDLERS = """
import os, signal
signal.signal(signal.SIGUSR2, lambda *_: print("before the import", flush=True))
import ddpwire.script
signal.signal(signal.SIGUSR1, lambda *_: print("after it", flush=True))
replaced = signal.signal(signal.SIGTERM, lambda *signals: (print("passed on", flush=True), replaced(*signals)))
if not os.fork():
    signal.raise_signal(signal.SIGUSR1)
    os._exit(0)
os.wait()
for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
    signal.raise_signal(number)
signal.pause()
"""


def test_a_handler_of_the_script_takes_its_signal_in_a_child_too_and_may_pass_it_on() -> None:
    command = [sys.executable, "-c", OWN_HANDLERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (143, "")
    assert done.stdout.splitlines() == ["after it", "before the import", "after it", "passed on"]


def test_its_node_sees_how_far_it_is(start: Start, tmp_path: Path) -> None:
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "DDP_HEARTBEAT_FILE": str(tmp_path / "heartbeat")}
    Heart(environ["DDP_HEARTBEAT_FILE"])
    assert (tmp_path / "heartbeat").stat().st_blocks, "a full disk would kill the rank at its first step"
    began_at = time.monotonic()
    process = start("short", **environ)
    assert process.communicate(timeout=30) == ("training\nfinally ran\natexit ran\n", "")
    beat = read_beat(tmp_path / "heartbeat")
    assert beat.step == 20
    assert not beat.is_complete, "20 of 4000"
    last = start("short", TOTAL="20", DDP_HEARTBEAT_FILE=str(tmp_path / "last"))
    assert (last.communicate(timeout=30)[1], read_beat(tmp_path / "last").is_complete) == ("", True)
    assert began_at < beat.at_s < time.monotonic()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    values = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
    del values["ddp_step_duration_seconds_bucket"], values["ddp_last_step_timestamp_seconds"]
    assert 19 * 0.002 < values.pop("ddp_step_duration_seconds_sum") < 5
    assert values == {
        "ddp_steps_total": 20,
        "ddp_samples_total": 160,
        "ddp_step_duration_seconds_count": 19,
        "ddp_last_step": 20,
        "ddp_loss": 0.5,
        "ddp_epoch": 1,
        "ddp_planned_steps": 4000,
    }


SAVES = """
import sys
import ddpwire.script as ddp
import torch
loss = torch.ones((), requires_grad=True) * 2
ddp.progress(6, loss=loss / 0)
ddp.progress(7, total=9, loss=loss)
ddp.saved(sys.argv[1])
ddp.saved(sys.argv[1] + ".gone", step=8)
"""


def test_its_node_learns_of_a_checkpoint_and_of_a_loss_with_a_gradient(tmp_path: Path) -> None:
    path, events = tmp_path / "last.pt", tmp_path / "events.jsonl"
    path.write_bytes(b"weights")
    (tmp_path / "metrics").mkdir()
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"), "DDP_EVENTS_FILE": str(events)}
    before = time.time()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SAVES, str(path)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{path}.gone" in done.stderr
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path / "metrics"))
    values = {sample.name: sample.value for family in registry.collect() for sample in family.samples}
    assert (values["ddp_loss"], values["ddp_planned_steps"]) == (2, 9)
    assert (values["ddp_checkpoint_last_step"], values["ddp_checkpoint_bytes"]) == (7, 7)
    assert before <= values["ddp_checkpoint_last_success_timestamp_seconds"] <= time.time()
    first, event = read_events(events.read_text())
    assert (first.event, first.step, first.facts) == ("not_finite", 6, {"what": "loss"})
    assert (event.event, event.step, event.facts) == ("checkpoint_saved", 7, {"bytes": 7, "path": str(path)})


@pytest.mark.parametrize(("first", "rank", "before"), [(1, "0", "57"), (51, "0", "57"), (1, "1", "57"), (1, "0", "")])
def test_a_start_from_the_beginning_is_reported_once(first: int, rank: str, before: str, tmp_path: Path) -> None:
    """By rank 0, if there were steps before and the first one is taken again."""
    code = f"import ddpwire.script as ddp\nfor step in ({first}, {first} + 1, 1): ddp.progress(step)"
    environ = {"RANK": rank, "DDP_STEPS_BEFORE": before, "DDP_EVENTS_FILE": str(tmp_path / "events.jsonl")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=20, check=True
    )
    is_reported = (first, rank, before) == (1, "0", "57")
    assert bool(done.stderr) == is_reported
    assert (tmp_path / "events.jsonl").exists() == is_reported
    if is_reported:
        (event,) = read_events((tmp_path / "events.jsonl").read_text())
        assert (event.event, event.facts) == ("started_over", {"steps": 57})
        assert "57" in done.stderr


def test_what_cannot_be_written_stops_no_training(start: Start) -> None:
    process = start("short", PROMETHEUS_MULTIPROC_DIR="/nonexistent", DDP_HEARTBEAT_FILE="/nonexistent/heartbeat")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "training\nfinally ran\natexit ran\n")
    assert ["/nonexistent/heartbeat" in err, "/nonexistent/counter_" in err, err.count("\n")] == [True, True, 2]


COST = """
import sys, timeit
import ddpwire.script as ddp
for call in (lambda: ddp.progress(5, samples=8), ddp.should_stop):
    print(1e6 * min(timeit.repeat(call, number=1000, repeat=50)) / 1000)
print(sorted({"torch", "prometheus_client"} & set(sys.modules)), ddp.exit_code())
"""


def test_without_ddprun_it_costs_nothing_and_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, timeout=20, check=True)
    *costs_us, last = done.stdout.splitlines()
    assert last == "[] 0"
    assert all(float(cost) < 2 for cost in costs_us)


def test_where_checkpoints_go(start: Start, tmp_path: Path) -> None:
    code = "import ddpwire.script as ddp; print(ddp.checkpoint_dir().is_dir(), ddp.checkpoint_dir())"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True
        ).stdout
        for environ in ({}, {"DDP_CHECKPOINT_DIR": str(tmp_path / "a" / "b")})
    ]
    assert outputs == ["True checkpoints\n", f"True {tmp_path}/a/b\n"]
