"""Measure what ddprun reports, and after how long, if a job on two machines is set up wrongly.

    python bench/misconfigured.py [--torchrun] [--results FILE [--for S]] [--write] [TITLE ...]

Prints a table. --write also puts it into docs/results/faults.md. --torchrun also runs torchrun. Needs root on Linux,
because the machines are network namespaces.

Needs an idle machine. With --results, the results are kept in a file, so that no measurement is repeated. With --for,
no new measurement starts after S seconds. Together, these options split the work: repeat the same command until it
prints the table.
"""

import concurrent.futures
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import measuring
from mistakes import CASES, JOIN_TIMEOUT_S, LONGER_S, MEETING_S, Case
from trial import BOUND_S, ROOT, Result, run

PAGE = ROOT / "docs" / "results" / "faults.md"
GOAL_S = 5.0
AT_ONCE = 4  # torchrun mostly waits
UNFINISHED = 75


class Results:
    """The results of each case with each launcher, and the times that ``import torch`` took meanwhile."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        exists = path is not None and path.exists()
        self._kept: dict[str, Any] = json.loads(path.read_text()) if path and exists else {"rows": {}, "import_s": []}

    @property
    def import_s(self) -> list[float]:
        return list(self._kept["import_s"])

    def of(self, title: str, launcher: str) -> Result | None:
        kept = self._kept["rows"].get(title, {}).get(launcher)
        return Result(**kept) if kept else None

    def add(self, title: str, launcher: str, result: Result) -> None:
        self._kept["rows"].setdefault(title, {})[launcher] = asdict(result)
        self._write()

    def measure_import(self) -> None:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
        self._kept["import_s"].append(time.monotonic() - began)
        self._write()

    def _write(self) -> None:
        if self._path:
            self._path.write_text(json.dumps(self._kept, indent=1))


def measure(results: Results, cases: list[Case], *, torchrun: bool, for_s: float) -> bool:
    """Measure the missing results. Return False if ``for_s`` seconds have passed before all are measured."""
    deadline = time.monotonic() + for_s
    missing = [case for case in cases if not results.of(case.title, "ddprun")]
    if missing and time.monotonic() <= deadline:
        results.measure_import()
    for case in missing:
        if time.monotonic() > deadline:
            return False
        results.add(case.title, "ddprun", run(case, "ddprun", "ours"))
    if missing:
        results.measure_import()
    missing = [case for case in cases if torchrun and not results.of(case.title, "torchrun")]
    for first in range(0, len(missing), AT_ONCE):
        if time.monotonic() > deadline:
            return False
        some = missing[first : first + AT_ONCE]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = pool.map(lambda pair: run(pair[1], "torchrun", f"t{pair[0]}-"), enumerate(some))
            for case, result in zip(some, outcomes, strict=True):
                results.add(case.title, "torchrun", result)
    return True


def table(results: Results, cases: list[Case]) -> str:
    versions = (
        f"Python {platform.python_version()}, torch {metadata.version('torch')}, {os.cpu_count()} cores, one run each"
    )
    alone = f"{min(results.import_s):.1f} to {max(results.import_s):.1f} s"
    text = (
        f"Measured with {versions}. `--join-timeout` was {LONGER_S} s for two machines with the same node rank, "
        f"{MEETING_S} s for the rows in which all nodes join, and {JOIN_TIMEOUT_S} s for the others. The rows "
        f"of torchrun were measured {AT_ONCE} at a time, and each torchrun was stopped after {BOUND_S:g} s. The "
        f"seconds count from the start of the last node's process, and include the start of Python. During the "
        f"measurements, the import of torch alone took {alone} on this machine.\n\n"
    )
    text += "| what is wrong | ddprun says | after s | exit code | torchrun |\n|---|---|---|---|---|\n"
    return text + "".join(row(case, results) for case in cases)


def row(case: Case, results: Results) -> str:
    ours, theirs = results.of(case.title, "ddprun"), results.of(case.title, "torchrun")
    assert ours
    cells = [case.title, ours.said, f"{ours.seconds:.1f}", str(ours.code), _told(theirs) if theirs else "not run"]
    return f"| {' | '.join(cells)} |\n"


def _told(result: Result) -> str:
    how = "still waiting" if result.code is None else f"exit code {result.code}"
    message = "without a message" if result.said == "nothing" else f"with the message: {result.said}"
    return f"{how} after {result.seconds:.1f} s, {message}"


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--torchrun", action="store_true", help=f"beside it, bounded at {BOUND_S:g} s each")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="keep what was measured here, and do not repeat it"
    )
    parser.add_argument("--for", dest="for_s", type=float, default=float("inf"), metavar="S", help="start no row later")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("titles", nargs="*")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.titles or case.title in args.titles]
    results = Results(args.results)
    if not measure(results, cases, torchrun=args.torchrun, for_s=args.for_s):
        print("the time of --for is over; some rows are not measured yet", file=sys.stderr)
        sys.exit(UNFINISHED)
    text = table(results, cases)
    print(text)
    if args.write:
        measuring.write_table(PAGE, "misconfigured.py", text)
    wrong = [(case, result) for case in cases if (result := results.of(case.title, "ddprun")) and result.code != 0]
    slow = [f"{case.title}: {result.seconds:.1f} s" for case, result in wrong if result.seconds > GOAL_S]
    print(f"{len(wrong) - len(slow)} of {len(wrong)} mistakes were told within {GOAL_S:g} s", *slow, sep="\n")
    sys.exit(any(result.code is None for _, result in wrong))


if __name__ == "__main__":
    main()
