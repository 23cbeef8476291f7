"""The subcommands ``bench`` and ``doctor``. They check a target with a job that runs ``ddpcheck`` there."""

import re
import statistics
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import typer

from ddpctl.commands.arguments import Json, print_result
from ddpctl.commands.formatting import ago
from ddpctl.commands.launch import File, Gpus, Nodes, Target, request_of_flags
from ddpctl.errors import UsageError
from ddpctl.operations import checks
from ddpctl.operations.launcher import open_context
from ddpwire import communication

DROP = 0.5  # a collective is reported if its busbw, divided by its busbw in the last bench, is below this value
WIDTH = 80  # of the result's lines
PARAMETERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3}
SIZE = re.compile(r"([1-9][0-9]{0,5})([KMG]?)i?B?", re.IGNORECASE)


def bench(
    target: Target = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    file: File = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="64K,16M", help="The data sizes to measure [default: depends on the backend]."),
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Also print the expected time of a step for each way of communication.")
    ] = False,
    parameters: Annotated[
        str | None, typer.Option("--parameters", metavar="11.7M", help="Advise for this model size [default: 11.7M].")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="200ms", help="Advise for this time of a step [default: 200ms].")
    ] = None,
    as_json: Json = False,
    show: Annotated[
        bool, typer.Option("--show", help="Only draw what each collective does with the data of four ranks.")
    ] = False,
) -> None:
    """Measure the collectives and the links of a target.

    The exit code is 69 if a collective gives a wrong result, or if a link or a node is slow.
    """
    if show:
        print("\n".join(drawings()))
        return
    advise = advise or parameters is not None or step is not None
    number = read_quantity("--parameters", "11.7M" if parameters is None else parameters, PARAMETERS)
    compute_s = read_quantity("--step", "200ms" if step is None else step, TIMES)
    arguments = ("--sizes", ",".join(map(str, read_sizes(sizes)))) if sizes else ()
    command = ("-m", "ddpcheck", "bench", *arguments, *(("--advise",) if advise else ()))
    request = request_of_flags({"target": target, "nodes": nodes, "gpus": gpus, "file": file, "command": command})
    if request.job.world_size < 2:
        raise UsageError("bench: a collective needs at least two ranks", hint="--gpus 2, or --nodes 2")
    context = open_context()
    before = checks.last_result(context, request.target, "bench")
    print_line = (lambda _: None) if as_json else partial(print, flush=True)
    _, result, lines = checks.run_check(context, request, name="bench", show=print_line)
    checks.keep_result(context, request.target, result, lines)
    result |= {"last": before} if before else {}
    result |= {"advice": advice(result, number, compute_s)} if advise else {}
    print_result(result, [*compared(result), *(advice_lines(result["advice"]) if advise else ())], as_json=as_json)
    raise typer.Exit(result["code"])


def doctor(
    target: Target = None, nodes: Nodes = None, gpus: Gpus = None, file: File = None, as_json: Json = False
) -> None:
    """Check the nodes of a target and the network between them.

    The exit code is 69 if a node fails a check. Lines below the table then name the node and the check, and
    say what to do.
    """
    request = request_of_flags({"target": target, "nodes": nodes, "gpus": gpus, "file": file})
    result, _ = checks.examine(open_context(), request)
    print_result(result, checks.lines(result), as_json=as_json)
    raise typer.Exit(result["code"])


def compared(result: Mapping[str, Any]) -> list[str]:
    """Compare a result with the target's last bench, if that bench had the same data sizes and number of ranks."""
    with suppress(KeyError, TypeError, AttributeError):  # no earlier result, or a result that another version wrote
        last = result["last"]
        rows = last["collectives"] if last["ranks"] == result["ranks"] else ()
        old = {(row["collective"], row["bytes"]): row["busbw"] for row in rows}
        ratios: dict[str, list[float]] = {}
        for row in result["collectives"]:
            if before := old.get((row["collective"], row["bytes"])):
                ratios.setdefault(row["collective"], []).append(row["busbw"] / before)
        if medians := {name: statistics.median(values) for name, values in ratios.items()}:
            elsewhere = "" if last["nodes"] == result["nodes"] else ", which was on other nodes"
            line = f"busbw: {statistics.median(medians.values()):.2f} of the last bench's{elsewhere}"
            low = ", ".join(f"{name} {ratio:.2f}" for name, ratio in medians.items() if ratio < DROP)
            lines = [f"{line} ({ago(time.time() - last['time'])} ago; the median of the collectives)"]
            return [*lines, *textwrap.wrap(f"less than half of the last bench: {low}", WIDTH)] if low else lines
    return []


def advice(result: Mapping[str, Any], num_parameters: float, compute_s: float) -> dict[str, Any]:
    """Return what a step is expected to take with each way of communication, and what this is computed from."""
    times_s = {row["bytes"]: row["seconds"] for row in result["collectives"] if row["collective"] == "all_reduce"}
    probes = [min(times_s, key=lambda size: abs(size - probe)) for probe in communication.PROBES]  # sizes are rounded
    link = communication.fit_link(result["ranks"], {size: times_s[size] for size in probes})
    shapes = communication.matrices(num_parameters)
    device = "cuda" if result["backend"] == "nccl" else "cpu"
    ways = [
        {
            "way": str(way),
            "seconds": communication.step_seconds(way, shapes, link, compute_s=compute_s, device=device),
            "bytes": communication.sent_bytes(communication.exchanged_bytes(way, shapes), link.num_ranks),
            "accuracy": communication.ACCURACY[way.kind],
        }
        for way in communication.ADVISED
    ]
    return {"parameters": num_parameters, "compute_s": compute_s, **vars(link), "ways": ways}


def advice_lines(advice: Mapping[str, Any]) -> list[str]:
    """Return a table of the result of `advice`."""
    plain_s = advice["ways"][0]["seconds"]
    rows = [
        f"{way['way']:<12}{three_digits(way['seconds']):>8} s{plain_s / way['seconds']:>8.2f}"
        f"{three_digits(way['bytes'] / 1e6):>11} MB   {way['accuracy']}"
        for way in advice["ways"]
    ]
    speed = f"{three_digits(advice['bytes_per_s'] / 1e6)} MB/s, latency {three_digits(1e3 * advice['latency_s'])} ms"
    model = f"{three_digits(advice['parameters'] / 1e6)} M parameters in float32, {advice['num_ranks']} ranks"
    return [
        "",
        f"{model}, {three_digits(advice['compute_s'])} s of computation per step, all_reduce {speed}:",
        f"{'WAY':<12}{'STEP':>10}{'SPEED':>8}{'SENT A STEP':>14}   ACCURACY (ddptrain --communication WAY)",
        *rows,
        "how this is computed: docs/slow_links.md",
    ]


def three_digits(value: float) -> str:
    """Return a number with three significant digits and no exponent."""
    return f"{float(f'{value:.3g}'):,g}"


def read_quantity(flag: str, text: str, units: Mapping[str, float]) -> float:
    """Parse a number greater than 0 with one of ``units``, such as ``11.7M``. Raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)([A-Za-z]*)", text)
    if not match or match[2] not in units or not float(match[1]):
        known = ", ".join(filter(None, units))
        raise UsageError(f"{flag}: {text!r} is not a number greater than 0, or its unit is not one of {known}")
    return float(match[1]) * units[match[2]]


def drawings() -> list[str]:
    """Draw what each collective does with the data of four ranks."""
    ranks, none = range(4), ["."] * 4
    own = [[f"{letter}{part}" for part in ranks] for letter in "ABCD"]
    sums, parts, others = [f"S{part}" for part in ranks], [own[rank][rank] for rank in ranks], [none] * 3

    def spread(cells: list[str]) -> list[list[str]]:
        return [[*none[:rank], cell, *none[rank + 1 :]] for rank, cell in enumerate(cells)]

    shown = {
        "all_reduce: every rank gets the sum (DDP: gradients)": (own, [sums] * 4),
        "reduce_scatter: each rank gets its part of the sum (FSDP: gradients)": (own, spread(sums)),
        "all_gather: every rank gets the parts of all (FSDP: weights)": (spread(parts), [parts] * 4),
        "all_to_all: rank r gets part r of every rank (experts)": (own, [*map(list, zip(*own, strict=True))]),
        "broadcast: every rank gets what rank 0 has (DDP: weights at the start)": ([own[0], *others], own[:1] * 4),
        "reduce: rank 0 gets the sum": (own, [sums, *others]),
        "scatter: each rank gets its part of what rank 0 has": ([own[0], *others], spread(own[0])),
        "gather: rank 0 gets the parts of all": (spread(parts), [parts, *others]),
        "send_recv: each rank sends to the next one (pipelines)": (own, [own[rank - 1] for rank in ranks]),
    }
    lines = ["Rank 0 has the parts A0 to A3, rank 1 has B0 to B3, and so on. S0 is A0 + B0 + C0 + D0."]
    for title, (before, after) in shown.items():
        lines += ["", title]
        for rank in ranks:
            row_before, row_after = (" ".join(f"{cell:<2}" for cell in cells[rank]) for cells in (before, after))
            lines.append(f"  rank {rank}   {row_before}   ->   {row_after}".rstrip())
    return lines


def read_sizes(text: str) -> list[int]:
    """Parse sizes such as ``64K,16M``. Return them in bytes, in ascending order. Raises UsageError."""
    sizes = []
    for word in text.split(","):
        match = SIZE.fullmatch(word.strip())
        if not match or (size := int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]) > 1 << 36:
            raise UsageError(f"--sizes: {word!r} is not a size: expected sizes up to 64G, such as 64K,16M")
        sizes.append(size)
    return sorted({*sizes})
