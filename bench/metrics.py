"""Measure the cost of metrics: in a step, for a scrape, and in a training with a hundred scrapes a second.

    python bench/metrics.py

Needs an idle machine. The first table has the CPU time of a rank's main thread. The wait for another rank is not
counted.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import measuring

WARM, WATCHED = 200, 2000  # steps
RANKS = 8
SCRAPES = 50
WINDOWS, WINDOW_S, CROWD = 5, 8.0, 100
START_S = 300.0


def rank(number: int, size: int, port: int) -> None:
    """Run one rank of a training in which steps only call the callbacks. Print microseconds per step."""
    import torch
    import torch.distributed as dist

    from ddprank.heartbeat import Heart
    from ddptrain.callbacks import Callbacks, NonFiniteGuard, ProgressDisplay
    from ddptrain.goodput import Goodput
    from ddptrain.metrics import open_metrics
    from ddptrain.step_timing import Phases, Tracer
    from ddptrain.straggler import StragglerDetector
    from ddpwire.events import EventLog

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=size)

    def callbacks_of(size: int) -> Callbacks:
        return Callbacks(
            poll_stop=lambda: 0,
            heartbeat=Heart(os.environ["DDP_HEARTBEAT_FILE"] + str(number)),
            metrics=metrics,
            goodput=Goodput(time.monotonic()),
            phases=Phases(),
            guard=NonFiniteGuard(torch.device("cpu")),
            stragglers=StragglerDetector(number, size, on_event=lambda *_: None),
            tracer=Tracer(0, Path(), log=print),
            progress=ProgressDisplay(),
            ddp=None,
            events=EventLog(None, node=0),
            on_gpu=False,
        )

    metrics = open_metrics(os.environ, first=number == 0)
    cost_us = {}
    for variant, callbacks in (
        ("metrics", callbacks_of(1)),
        ("metrics and the comparison of ranks", callbacks_of(size)),
    ):
        for step in range(1, WARM + WATCHED + 1):
            if step == WARM:
                began = time.thread_time()
            callbacks.phases.begin()
            for phase in ("data", "forward", "backward", "optimizer"):
                callbacks.phases.mark(phase)
            callbacks.on_step_end(step=step, epoch=1, samples=32, lr=0.1)
        cost_us[variant] = 1e6 * (time.thread_time() - began) / WATCHED
        callbacks.stragglers.read_answer(step)
    dist.barrier()
    print(json.dumps(cost_us), flush=True)
    os._exit(0)


def a_step(size: int = 2) -> dict[str, float]:
    """Return the CPU time of a step on the slowest rank, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        processes, port = [], measuring.free_port()
        for number in range(size):
            metrics = Path(folder, f"rank-{number}")
            metrics.mkdir()
            environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics), "DDP_HEARTBEAT_FILE": f"{folder}/beat-"}
            command = [sys.executable, __file__, "rank", str(number), str(size), str(port)]
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        costs = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    return {variant: max(cost[variant] for cost in costs) for variant in costs[0]}


FILL = """
import os, sys
from ddptrain.metrics import open_metrics
from ddpwire import metrics as catalogue
from ddpwire.metrics import STEP_PHASES, UNPRODUCTIVE_CAUSES
metrics = open_metrics(os.environ, first=sys.argv[1] == "0")
metrics.training_info(backend="nccl", device="cuda", model="m", dataset="d", num_steps=9, flops_per_sample=9)
metrics.step(step=1, epoch=1, samples=1, lr=0.1)
metrics.step_duration(0.1)
metrics.gauge(catalogue.STRAGGLER_SKEW, 1.0)
metrics.gauge(catalogue.RELATIVE_SPEED, 1.0)
metrics.memory(allocated=1, reserved=1, peak=1)
metrics.time_spent(dict.fromkeys(STEP_PHASES, 1.0), 1.0, dict.fromkeys(UNPRODUCTIVE_CAUSES, 1.0))
if sys.argv[1] == "0":
    metrics.epoch(loss=1.0, accuracy=1.0, grad_norm=1.0)
    metrics.checkpoint("save", seconds=1.0, step=1, written_at=1.0, size_bytes=1)
metrics.flush()
"""


def a_scrape() -> tuple[dict[str, int], float, float]:
    """Return the number of series of each rank, and the median and slowest time of a scrape in milliseconds.

    The node has 8 ranks. The key "" has the node's own series."""
    from prometheus_client import CollectorRegistry

    from ddprun.metrics import host_metrics
    from ddprun.metrics import metrics as node_metrics

    with tempfile.TemporaryDirectory() as folder:
        for number in range(RANKS):
            metrics = Path(folder, f"rank-{number}")
            metrics.mkdir()
            environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
            subprocess.run([sys.executable, "-c", FILL, str(number)], env=environ, check=True, timeout=120)
        registry = CollectorRegistry()
        node_metrics.NodeSeries(registry)
        for collector in (node_metrics.RankSeries(lambda: Path(folder), dict), host_metrics.machine_series()):
            registry.register(collector)
        url = f"http://127.0.0.1:{node_metrics.serve_registry(registry, '127.0.0.1', 0)}/metrics"
        times = []
        for _ in range(SCRAPES):
            time.sleep(0.3)  # a node sends a response again for 0.25 s
            began = time.perf_counter()
            text = get(url)
            times.append(1e3 * (time.perf_counter() - began))
    counts = {str(number): text.count(f'rank="{number}"') for number in range(RANKS)}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {"": len(lines) - sum(counts.values()), **counts}, statistics.median(times), max(times)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def crowd(url: str, until: float) -> int:
    """Make a hundred scrapes at once every second. One other request stays open. Return the number of answers."""
    host, port = url.split("/")[2].split(":")
    answered = []
    with socket.create_connection((host, int(port))) as hanging:
        hanging.send(b"GET /metrics HTTP/1.1\r\n")  # an incomplete request
        while time.monotonic() < until:
            threads = [threading.Thread(target=lambda: answered.append(get(url))) for _ in range(CROWD)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(1)
    return len(answered)


def steps_of(url: str) -> tuple[float, float]:
    """Return the total duration (in seconds) and the number of rank 0's steps so far."""
    values = dict(line.rsplit(" ", 1) for line in get(url).splitlines() if line.startswith("ddp_step_duration"))
    return (
        float(values['ddp_step_duration_seconds_sum{rank="0"}']),
        float(values['ddp_step_duration_seconds_count{rank="0"}']),
    )


def a_crowd() -> tuple[list[float], list[float], int]:
    """Return the milliseconds per step without scrapes and with scrapes, and the number of answered scrapes.

    Time windows without scrapes and with scrapes take turns."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddprun", "--run-dir", folder, "-m", "ddptrain", "--epochs=100000"]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "DDP_DEVICE": "cpu"}
        process = subprocess.Popen([*command, "--input=device"], env=environ, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            state = Path(folder, "node-0", "node.json")

            def find_url() -> str:
                return (json.loads(state.read_text())["metrics"] or "") if state.exists() else ""

            measuring.wait_until(find_url, "a metrics address", timeout_s=START_S, pause_s=0.2)
            url = find_url()
            measuring.wait_until(
                lambda: "ddp_eval_accuracy_ratio{" in get(url), "an evaluation", timeout_s=START_S, pause_s=0.5
            )
            times: tuple[list[float], list[float]] = ([], [])
            answered = 0
            for window in range(2 * WINDOWS):
                time.sleep(1)
                before = steps_of(url)
                if window % 2:
                    answered += crowd(url, time.monotonic() + WINDOW_S)
                else:
                    time.sleep(WINDOW_S)
                time.sleep(1)  # the counters are written twice a second
                after = steps_of(url)
                times[window % 2].append(1e3 * (after[0] - before[0]) / (after[1] - before[1]))
            return times[0], times[1], answered
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    """Run all measurements."""
    print(f"microseconds of CPU a step, the worse of 2 ranks, {WATCHED} steps")
    for variant, cost in a_step().items():
        print(f"  {variant:40}{cost:8.1f}")
    counts, median, slowest = a_scrape()
    own, *ranks = counts.values()
    print(f"series: rank 0 {ranks[0]}, another rank {ranks[1]}, the node itself {own}")
    print(f"scrape of a node of {RANKS} ranks: {median:.1f} ms, the slowest of {SCRAPES} {slowest:.1f} ms")
    alone, crowded, answered = a_crowd()
    ratio = statistics.median(crowded) / statistics.median(alone)
    print(
        f"step: {statistics.median(alone):.3f} ms alone, {statistics.median(crowded):.3f} ms with {CROWD} scrapes "
        f"a second at once and one that hangs ({answered} answered): x {ratio:.4f}"
    )
    print(f"  alone {', '.join(f'{ms:.3f}' for ms in alone)}")
    print(f"  crowd {', '.join(f'{ms:.3f}' for ms in crowded)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*map(int, sys.argv[2:]))
    main()
