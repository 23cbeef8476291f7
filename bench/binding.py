"""Measure whether it helps to bind each rank to its own cores.

    python bench/binding.py [--repeats 5] [--nproc 2] [--modes none exclusive] [-- ARGUMENTS OF ddptrain]

For each of --modes, ddprun runs ddptrain on --nproc ranks with --numa-binding MODE. The images/s of each mode are
compared with those of the first mode. The modes take turns. The exit code is 0 whatever the numbers are.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile

import measuring

TIMEOUT_S = 300


def images_per_s(mode: str, nproc: int, arguments: list[str]) -> float:
    """Return the total images/s of all ranks, which ddptrain prints at its end."""
    command = [sys.executable, "-m", "ddprun", "--nproc-per-node", str(nproc), "--numa-binding", mode]
    with tempfile.TemporaryDirectory() as folder:  # so that no run continues from the checkpoint of another
        done = subprocess.run(
            [*command, "--run-dir", folder, "-m", "ddptrain", *arguments],
            env=os.environ | {"DDP_DEVICE": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
    match = re.search(r"images/s +([0-9.,]+)", done.stdout.rpartition("world size")[2])
    assert match, done.stdout
    return float(match[1].replace(",", ""))


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["none", "exclusive"])
    parser.add_argument("arguments", nargs="*", help="for ddptrain, behind --")
    args = parser.parse_args()
    rates_of: dict[str, list[float]] = {mode: [] for mode in args.modes}
    for _, mode in measuring.in_turns(args.modes, args.repeats):
        rates_of[mode].append(images_per_s(mode, args.nproc, args.arguments))
    print(f"{args.nproc} ranks, {len(os.sched_getaffinity(0))} usable cores of {measuring.machine()}")
    print(measuring.head("images/s", 16, 8))
    for mode, rates in rates_of.items():
        print(measuring.row(mode, rates, 16, "8.0f"))
    base = statistics.median(rates_of[args.modes[0]])
    for mode in args.modes[1:]:
        print(f"{mode} / {args.modes[0]}: {statistics.median(rates_of[mode]) / base:.3f}")


if __name__ == "__main__":
    main()
