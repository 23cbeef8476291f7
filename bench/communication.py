"""Compare the ways of ``ddptrain --communication``: seconds per step over slow links, and the accuracy after training.

    python bench/communication.py [--links 100mbit,...] [--ways plain,...] [--rounds 1] [--json FILE]
    python bench/communication.py --accuracy [--seeds 0,1,2] [--data digits,synthetic] [--ways plain,...] [--json FILE]

The first form needs root. Two ranks train a ResNet-18 (11.2 million parameters) on small images, on two machines made
of network namespaces. A token bucket limits the link in both directions. The ways take turns, and each round reverses
their order. A way that exchanges weights is measured over a whole number of rounds, at least two. The table shows the
measured time of a step next to the one that ``ddpctl bench --advise`` expects from the link's all-reduces and from the
time of a step without communication. "none" is a link without a limit. The second form trains on two ranks of this
machine, without a limit.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
from lab import Machine, machines
from scaling import limited

from ddpctl.commands.checks import advice
from ddpwire.communication import AUTO, parse_way

RANK = str(Path(__file__).with_name("communication_rank.py"))
WAYS = ["plain", "bf16", "powersgd:4", "localsgd:8", "diloco:32", AUTO]
LINKS = ["50mbit", "100mbit", "500mbit", "1gbit", "none"]
TIMEOUT_S = 900
PORT = 29400
BATCH = 4
WARM_UP = 2
ROUNDS_OF_STEPS = 64  # steps of a way with a number of steps between exchanges
DATA = {
    "digits": ("--data=digits",),
    "synthetic": (
        "--data=synthetic", "--synthetic-samples=5000", "--synthetic-shape=3x16x16", "--model=convnet", "--epochs=5",
        "--batch-size=32", "--lr=0.02",
    ),
}  # fmt: skip


def run_pair(pair: tuple[Machine, ...], way: str, warm_up: int, steps: int) -> dict[str, Any]:
    """Run a rank on each machine. Return what rank 0 prints."""
    images = [f"--synthetic-samples={4 * BATCH * (warm_up + steps + 1)}", "--synthetic-shape=3x16x16"]
    how = ["--data=synthetic", *images, "--model=resnet18", f"--batch-size={BATCH}", "--no-augment"]
    meet = [f"--init-method=tcp://{pair[0].address}:{PORT}", "--world-size=2", f"--communication={way}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    command = [RANK, str(warm_up), str(steps), *how, *meet]
    ranks = [
        machine.start(*command, f"--rank={rank}", env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, machine in enumerate(pair)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit(f"communication.py: {way} failed: {[error.decode()[-400:] for _, error in outputs]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def measured(pair: tuple[Machine, ...], way: str, steps: int) -> dict[str, Any]:
    """Measure a way: ``steps`` steps, or whole rounds if the ranks exchange weights. auto chooses before."""
    if way == AUTO:
        return run_pair(pair, way, 10, ROUNDS_OF_STEPS)
    local = parse_way(way).is_local
    return run_pair(pair, way, WARM_UP, ROUNDS_OF_STEPS if local else steps)


def over_links(args: argparse.Namespace) -> dict[str, Any]:
    """Return for each link its all-reduces, and for each way the measured results."""
    results: dict[str, Any] = {}
    with machines(2, prefix="comm") as pair:
        alone = "localsgd:1000000"  # no exchange of weights
        results["compute_s"] = [run_pair(pair, alone, WARM_UP, args.steps)["step_s"]]
        for link in args.links:
            with limited(pair, link):
                probe = run_pair(pair, "plain", 0, 0)
                ways: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
                for _, way in measuring.in_turns(args.ways, args.rounds):
                    ways[way].append(measured(pair, way, args.steps))
                    print(f"{link} {way}: {ways[way][-1]}", file=sys.stderr, flush=True)
                results["compute_s"].append(run_pair(pair, alone, WARM_UP, args.steps)["step_s"])
                results[link] = {"all_reduce": probe["all_reduce"], "parameters": probe["parameters"], "ways": ways}
                results[link]["compute_s"] = statistics.mean(results["compute_s"][-2:])
    return results


def link_table(link: str, result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of a link."""
    rows = [
        {"collective": "all_reduce", "bytes": int(size), "seconds": seconds}
        for size, seconds in result["all_reduce"].items()
    ]
    seconds = {way: statistics.median(run["step_s"] for run in runs) for way, runs in result["ways"].items()}
    advised = advice({"ranks": 2, "backend": "gloo", "collectives": rows}, result["parameters"], result["compute_s"])
    expected = {way["way"]: way for way in advised["ways"]}
    lines = [
        f"two machines, link {link}, ResNet-18, batch {BATCH}, {result['compute_s']:.3g} s of computation per step",
        f"{'way':<14}{'s a step':>10}{'images/s':>10}{'over plain':>12}{'expected s':>12}{'measured / expected':>21}",
    ]
    for way, step_s in seconds.items():
        line = f"{way:<14}{step_s:>10.3f}{BATCH / step_s:>10.1f}{seconds.get('plain', 0) / step_s:>12.2f}"
        if way in expected:
            line += f"{expected[way]['seconds']:>12.3f}{step_s / expected[way]['seconds']:>21.2f}"
        elif choices := {(run["choice"] or {}).get("way") for run in result["ways"][way]}:
            line += f"  chose {', '.join(map(str, choices))}"
        lines.append(line)
    return lines


def accuracy(data: str, way: str, seed: int) -> float:
    """Train on two ranks of this machine. Return the accuracy on the test images in percent."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddptrain", "--spawn=2", f"--checkpoint-dir={folder}", f"--seed={seed}"]
        environ = measuring.clean_environ() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *DATA[data], f"--communication={way}"], check=False, env=environ, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"communication.py: {way} on {data} failed: {done.stderr[-400:]}")
        return float(re.findall(r"test accuracy +([0-9.]+)", done.stdout)[-1])


def accuracies(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the accuracies by data set and way."""
    results: dict[str, dict[str, list[float]]] = {data: {way: [] for way in args.ways} for data in args.data}
    for data, ways in results.items():
        for seed in args.seeds:
            for way in args.ways:
                ways[way].append(accuracy(data, way, seed))
                print(f"{data} {way} seed {seed}: {ways[way][-1]}", file=sys.stderr, flush=True)
    return results


def accuracy_table(data: str, ways: dict[str, list[float]]) -> list[str]:
    """Return the lines of the table of a data set."""
    plain = statistics.mean(next(iter(ways.values())))
    lines = [f"test accuracy on {data}, %", f"{'way':<14}{'mean':>8}{'lost':>8}   seeds"]
    for way, values in ways.items():
        mean = statistics.mean(values)
        lines.append(f"{way:<14}{mean:>8.2f}{plain - mean:>8.2f}   {', '.join(f'{value:.2f}' for value in values)}")
    return lines


def names(text: str) -> Sequence[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--links", type=names, default=LINKS)
    parser.add_argument("--ways", type=names, default=WAYS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--data", type=names, default=list(DATA))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in names(text)], default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"gloo, one thread a rank, {measuring.machine()}")
    if args.accuracy:
        results: dict[str, Any] = accuracies(args)
        for data, ways in results.items():
            print("\n".join(accuracy_table(data, ways)), flush=True)
    else:
        results = over_links(args)
        for link in args.links:
            print("\n".join(link_table(link, results[link])), flush=True)
    measuring.write_json(args.json, {"machine": measuring.machine(), "results": results})


if __name__ == "__main__":
    main()
