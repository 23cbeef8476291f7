"""Measure ddptrain on two nodes of which one has half the CPU time: equal shares against ``--balance auto``, in turns.

    python bench/balance.py [--rounds 3] [--quota 0.4] [--epochs 4] [--json FILE]

Each node is a ddprun with one rank, in a cgroup of its own: node 0 may use --quota of a core, and node 1 half of it. So
the machine must let this process make cgroups (cpu, version 1 or 2). ``--balance auto`` measures the first epoch, so
the speed is that of the epochs after it, from the events of the run. The ideal ratio is 1.5: with equal shares, a step
takes the time of the slow node for half of a batch, and with 2:1 that for a third of it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import measuring

from ddpwire.events import read_events

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a step of some 100 ms is not quantised
TIMEOUT_S = 600.0
END_S = 10.0
OPTIONS = ("--data=synthetic", "--synthetic-samples=4096", "--synthetic-shape=3x32x32", "--model=convnet",
           "--norm=group", "--batch-size=256", "--precision=fp32", "--device=cpu", "--checkpoint-every=0")  # fmt: skip


@contextmanager
def cgroup(name: str, quota: float) -> Iterator[Path]:
    """Make a cgroup that may use this share of a core. Yield the file to which a process writes its id.

    Other processes of a shared machine come after it, so that only the quota limits it.
    """
    is_first_version = (CGROUPS / "cpu").is_dir()
    folder = CGROUPS / ("cpu" if is_first_version else "") / f"ddpctl-bench-{os.getpid()}-{name}"
    folder.mkdir()
    try:
        quota_us = round(quota * PERIOD_US)
        if is_first_version:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            (folder / "cpu.shares").write_text("262144")
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            (folder / "cpu.weight").write_text("10000")
        yield folder / "cgroup.procs"
    finally:
        deadline = time.monotonic() + END_S
        while folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # a process of it is still ending
                folder.rmdir()
            time.sleep(0.1)


def train(way: str, *, quota: float, epochs: int) -> tuple[float, str]:
    """Run one training. Return the images per second after the first epoch, and the shares that were logged."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port, nodes = str(measuring.free_port()), []
        for node, share in enumerate((quota, quota / 2)):
            tasks = stack.enter_context(cgroup(str(node), share))
            place = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port)
            enter = f"import os, sys; open({str(tasks)!r}, 'w').write(str(os.getpid())); "
            enter += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
            command = ["-c", enter, "-m", "ddprun", *place, "-m", "ddptrain", *OPTIONS, f"--balance={way}"]
            nodes.append(
                measuring.start_python(
                    [*command, f"--epochs={epochs}"],
                    cwd=folder,
                    env=measuring.clean_environ() | {"DDP_RUN_DIR": f"{folder}/run", "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.wait()
        if any(node.returncode for node in nodes):
            sys.exit(f"{way}: exit codes {[node.returncode for node in nodes]}\n{outputs[0]}")
        events = read_events(Path(folder, "run/node-0/events.jsonl").read_text())
        speeds = [float(event.facts["images_per_s"]) for event in events if event.event == "epoch_ended"]
        shares = [line.rpartition(" ")[2] for line in outputs[0].splitlines() if "--balance" in line]
        return statistics.median(speeds[1:]), " ".join(shares) or "1:1"


def main() -> None:
    """Print the speed of each run, and the ratio of the medians."""
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quota", type=float, default=0.4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    speeds: dict[str, list[float]] = {"off": [], "auto": []}
    for number, way in measuring.in_turns([*speeds], given.rounds):
        speed, shares = train(way, quota=given.quota, epochs=given.epochs)
        speeds[way].append(speed)
        print(f"round {number + 1}  --balance {way:4}  {speed:7.1f} images/s  shares {shares}", flush=True)
    ratio = statistics.median(speeds["auto"]) / statistics.median(speeds["off"])
    print(f"auto is {ratio:.2f} times as fast as equal shares (ideal: 1.5)")
    measuring.write_json(given.json, {"images_per_s": speeds, "ratio": round(ratio, 3)})


if __name__ == "__main__":
    main()
