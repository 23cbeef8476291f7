"""Measure the effects of faults on a training on two machines x two ranks, with real processes and real signals.

    python bench/faults.py [--rows 1,3,4] [--times 20 | --long] [--torchrun] [--json FILE] [--write]

Prints a table. --write also puts it into docs/results/faults.md. Each of the rows 1, 3 and 4 runs as many times as
--times says (--long: 59 times). These runs are divided among the variants of the row. Each variant of the other rows
runs once. With --torchrun, the first variant of each of the rows 1, 3, 9 and 15 also runs once with unmodified
torchrun. Needs root on Linux, because the machines are network namespaces. The exit code is 1 if any result of ddprun
is not as expected.
"""

import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import measuring
import torch
from fault_injection.experiment import undisturbed
from fault_injection.result import Result, violations
from fault_injection.rows import ROWS, Row, try_fault

PAGE = Path(__file__).parent.parent / "docs" / "results" / "faults.md"
REPEATED = (1, 3, 4)
BESIDE = (1, 3, 9, 15)
LIMIT_S = 90.0
HEAD = "| # | what happens | noticed, s | trains again, s | ended, s | steps lost | left | as expected |\n"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result of one fault, and its differences from what is expected."""

    row: Row
    launcher: str
    result: Result
    wrong: tuple[str, ...]


def times(row: Row, number: int) -> int:
    """Return how often a variant of a fault is tried. The tries of a row are spread over its variants."""
    ways = sum(other.number == row.number for other in ROWS)
    return math.ceil(number / ways) if row.number in REPEATED else 1


def try_once(row: Row, weights: str, seed: int, launcher: str = "ddprun") -> Tried:
    with tempfile.TemporaryDirectory() as folder:
        limit_s = 0.0 if launcher == "ddprun" else LIMIT_S
        result = try_fault(row, Path(folder) / "run", weights, seed=seed, launcher=launcher, limit_s=limit_s)
    tried = Tried(row=row, launcher=launcher, result=result, wrong=violations(result, row.bars, timed=True))
    state = "; ".join(tried.wrong) or "as expected"
    times = f"noticed {said(result.noticed_s)}, again {said(result.again_s)}, ended {said(result.ended_s)}"
    print(f"{launcher}: row {row.number}: {row.title}: {times}: {state}", file=sys.stderr, flush=True)
    return tried


def said(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def both(values: Sequence[float | None], form: str = ".2f") -> str:
    """Return the median and the highest value, or the only value."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return format(numbers[0], form)
    return f"{statistics.median(numbers):{form}}, at worst {max(numbers):{form}}"


def line(tries: Sequence[Tried]) -> str:
    """Return a row of the table."""
    row, result = tries[0].row, [tried.result for tried in tries]
    cells = [
        str(row.number),
        row.title,
        both([each.noticed_s for each in result]),
        both([each.again_s for each in result]),
        both([each.ended_s if each.again_s is None else None for each in result]),
        both([each.steps_lost for each in result], ".0f"),
        str(sum(each.orphans for each in result)),
        f"{sum(not tried.wrong for tried in tries)} of {len(tries)}",
    ]
    return f"| {' | '.join(cells)} |\n"


def beside(tried: Tried) -> str:
    """Return a row of torchrun's table. The row is not compared with what is expected."""
    result = tried.result
    again = f"not within {LIMIT_S:g} s" if result.timed_out else said(result.again_s)
    cells = [
        str(tried.row.number),
        tried.row.title,
        said(result.noticed_s),
        again,
        said(result.ended_s),
        str(result.orphans),
    ]
    return f"| {' | '.join(cells)} |\n"


def table(tries: Sequence[Tried]) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, gloo, {os.cpu_count()} cores"
    text = (
        f"Measured with {versions} ({platform.machine()}), two machines (network namespaces) x two ranks, "
        "a step of 0.1 s, a checkpoint every 10 steps. "
        "If a row had several tries, it shows the median and the worst.\n\n"
        f"{HEAD}|---|---|---|---|---|---|---|---|\n"
    )
    ours = [[tried for tried in tries if tried.row == row and tried.launcher == "ddprun"] for row in ROWS]
    text += "".join(line(tried) for tried in ours if tried)
    theirs = sorted((tried for tried in tries if tried.launcher == "torchrun"), key=lambda tried: tried.row.number)
    if theirs:
        text += "\nStock torchrun with `--max-restarts 3` and static rendezvous, once each:\n\n"
        text += "| # | what happens | noticed, s | trains again, s | ended, s | left |\n|---|---|---|---|---|---|\n"
        text += "".join(map(beside, theirs))
    return text


def as_dict(tried: Tried) -> dict[str, object]:
    place = {"row": tried.row.number, "title": tried.row.title, "launcher": tried.launcher}
    return place | {"wrong": tried.wrong, "result": asdict(tried.result)}


def read(path: Path) -> list[Tried]:
    """Return the results of an earlier run of this benchmark."""
    rows = {row.title: row for row in ROWS}
    return [
        Tried(
            row=rows[tried["title"]],
            launcher=tried["launcher"],
            result=Result(**tried["result"]),
            wrong=tuple(tried["wrong"]),
        )
        for tried in (json.loads(path.read_text()) if path.exists() else ())
    ]


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--rows", default=",".join(sorted({str(row.number) for row in ROWS}, key=int)))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--long", dest="times", action="store_const", const=59)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--json", type=Path, help="results are added to those that it has: a long series in parts")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [row for row in ROWS if str(row.number) in args.rows.split(",")]
    compared = {row.number: row for row in reversed(ROWS) if args.torchrun and row.number in BESIDE and row in rows}
    weights = ""
    if rows:
        with tempfile.TemporaryDirectory() as folder:
            weights = undisturbed(Path(folder) / "run")
    before = read(args.json) if args.json else []
    new = [try_once(row, weights, args.seed + i) for row in rows for i in range(times(row, args.times))]
    new += [try_once(row, weights, args.seed, "torchrun") for _, row in sorted(compared.items())]
    text = table([*before, *new])
    print(text)
    measuring.write_json(args.json, [as_dict(tried) for tried in (*before, *new)])
    if args.write:
        measuring.write_table(PAGE, "faults.py", text)
    sys.exit(any(tried.wrong for tried in new if tried.launcher == "ddprun"))


if __name__ == "__main__":
    main()
