"""Measure the images/s of real trainings with more ranks, and over slow networks.

    python bench/scaling.py [--ranks 1,2,4] [--links none,1gbit,100mbit] [--options all] [--rounds 3] [--json FILE]

The first table is for 1, 2 and 4 ranks on the loopback. The other tables need root. They are for two ranks on two
machines made of network namespaces, one table for each of --links. A token bucket limits the link in both directions.
The options of DDP take turns, and each round reverses their order. The model is ResNet-18 (45 MB of gradients) on small
images, so that the link matters.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import measuring
from lab import Machine, machines
from measuring import start_python

OPTIONS = {
    "plain": (),
    "no bucket view": ("--no-bucket-view",),
    "static graph": ("--static-graph",),
    "bucket 5 MB": ("--bucket-mb=5",),
    "bucket 100 MB": ("--bucket-mb=100",),
    "bf16 gradients": ("--compress=bf16",),
    "fp16 gradients": ("--compress=fp16",),
    "accumulate 4": ("--batch-size=64", "--accumulate=4"),
}
TIMEOUT_S = 300
PORT = 29400
LINKS = ["none", "1gbit", "100mbit"]
RANK = Path(__file__).with_name("communication_rank.py")
WARM_UP = 2  # steps


def training(steps: int, options: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of Python for a rank: ``steps`` steps of 16 images, and the warm-up before."""
    images = ["--data=synthetic", f"--synthetic-samples={64 * (steps + WARM_UP)}", "--synthetic-shape=3x16x16"]
    how = ["--model=resnet18", "--batch-size=16", "--no-augment", *options]
    return [str(RANK), str(WARM_UP), str(steps), *images, *how]


def rate(commands: list[list[str]], start: Callable[..., subprocess.Popen[str]]) -> float:
    """Run these ranks, which ``start`` starts. Return the images/s of all ranks together."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe, mixed = subprocess.PIPE, subprocess.STDOUT
    ranks = [start(command, env=environ, stdout=pipe, stderr=mixed, text=True) for command in commands]
    try:
        outs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"scaling.py: a training failed: {outs[0].splitlines()[-1:]} {outs[-1].splitlines()[-1:]}")
    printed = json.loads(outs[0].splitlines()[-1])
    return float(printed["batch_size"] / printed["step_s"])


def on_loopback(size: int, steps: int) -> float:
    """Return the images/s of ``size`` ranks on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        meet = [f"--init-method=file://{folder}/meet", f"--world-size={size}"]
        return rate([[*training(steps), *meet, f"--rank={rank}"] for rank in range(size)], start_python)


@contextlib.contextmanager
def limited(pair: tuple[Machine, ...], link: str):
    """Limit the link between two machines."""
    if link == "none":
        yield
        return
    bucket = ["root", "tbf", "rate", link, "burst", "256kb", "latency", "50ms"]
    for machine in pair:
        subprocess.run(["tc", "-n", machine.namespace, "qdisc", "add", "dev", "eth0", *bucket], check=True)
    try:
        yield
    finally:
        for machine in pair:
            subprocess.run(["tc", "-n", machine.namespace, "qdisc", "del", "dev", "eth0", "root"], check=True)


def on_link(pair: tuple[Machine, ...], options: tuple[str, ...], steps: int) -> float:
    """Return the images/s of two ranks, one on each machine."""
    meet = [f"--init-method=tcp://{pair[0].address}:{PORT}", "--world-size=2"]
    here = ["env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, *training(steps, options), *meet]
    return rate([machine.command(*here, f"--rank={rank}") for rank, machine in enumerate(pair)], subprocess.Popen)


def over_links(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the rates for each link and each set of options. Each round reverses the order of the options."""
    links: dict[str, dict[str, list[float]]] = {link: {name: [] for name in args.options} for link in args.links}
    with machines(2, prefix="scale") as pair:
        for link, rates in links.items():
            with limited(pair, link):
                for _, name in measuring.in_turns(args.options, args.rounds):
                    rates[name].append(on_link(pair, OPTIONS[name], args.steps))
    return links


def table(sizes: dict[int, list[float]], links: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of the tables."""
    lines = [measuring.head("ranks on the loopback, images/s", 38, 8)] if sizes else []
    for size, values in sizes.items():
        lines.append(measuring.row(f"{size}", values, 38, "8.1f"))
    for link, rates in links.items():
        lines.append(measuring.head(f"two machines, link {link}, images/s", 38, 8) + f"{'over plain':>12}")
        plain = statistics.median(next(iter(rates.values())))
        for name, values in rates.items():
            lines.append(measuring.row(f"  {name}", values, 38, "8.1f") + f"{statistics.median(values) / plain:12.2f}")
    return lines


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument(
        "--ranks", type=lambda text: [int(number) for number in text.split(",") if number], default=[1, 2, 4]
    )
    parser.add_argument("--links", type=lambda text: [link for link in text.split(",") if link], default=LINKS)
    parser.add_argument("--options", type=lambda text: text.split(","), default=list(OPTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = {size: [on_loopback(size, args.steps) for _ in range(args.rounds)] for size in args.ranks}
    links: dict[str, dict[str, list[float]]] = {}
    if args.links and os.geteuid() == 0:
        links = over_links(args)
    elif args.links:
        print("links need root (network namespaces): skipped", file=sys.stderr)
    print(f"ResNet-18, 16x16 images, batch 16, gloo, one thread a rank, {measuring.machine()}")
    print("\n".join(table(sizes, links)))
    measuring.write_json(args.json, {"machine": measuring.machine(), "loopback": sizes, "links": links})


if __name__ == "__main__":
    main()
