"""The check ``bench``: measures the bandwidth of each collective, and finds wrong results and slow links."""

import statistics
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck import collectives, links
from ddpcheck.collectives import Ranks, join
from ddpwire.communication import PROBES
from ddpwire.exits import Exit

SIZES = {"cpu": (4 << 10, 64 << 10, 1 << 20, 16 << 20), "cuda": (64 << 10, 1 << 20, 16 << 20, 256 << 20)}
LONGEST_S = 2.0  # a size is left out if a call would take longer, as estimated from the previous size
LATENCY_S = 0.1  # a shorter call is mostly latency, so no time is estimated from it
MATRIX = 8  # all links are shown if there are at most so many members, otherwise only the slowest links
MAX_LINKS = 1000  # in the result, the slowest first


def main(options: Namespace) -> dict[str, Any] | None:
    """Measure all collectives and links. Rank 0 prints each measurement and returns the result."""
    ranks = join()
    show: Callable[..., None] = partial(print, flush=True) if ranks.rank == 0 else lambda *_: None
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    where = [*dict.fromkeys(map(ranks.node_name, range(ranks.size)))]
    nodes = ", ".join(where) if len(where) <= MATRIX else f"{len(where)} nodes"
    show(f"{ranks.size} ranks, {backend}, torch {torch.__version__}: {nodes}")
    show()
    sizes, probes = options.sizes or SIZES[ranks.device.type], PROBES if options.advise else ()
    rows, findings = _collectives(ranks, sizes, probes, show)
    members = links.members_of(ranks)
    figures = dict(links.measure(ranks, members, [*links.rounds(len(members))]))
    suspects, slow, notes = links.find_slow(ranks, members, figures)
    names = [ranks.node_name(rank) if {*ranks.nodes} != {0} else f"rank {rank}" for rank in members]
    for line in ("", *link_lines(figures, names), *notes, ""):
        show(line)
    findings += [sentence(link, names) for link in slow]
    for line in findings or ["every result is right; no link and no node is named"]:
        show(line)
    ranks.barrier()
    dist.destroy_process_group()
    if ranks.rank:
        return None
    return {
        "code": int(Exit.UNAVAILABLE if findings else Exit.OK),
        "findings": findings,
        "ranks": ranks.size,
        "backend": backend,
        "torch": torch.__version__,
        "nodes": [ranks.hosts[ranks.nodes.index(node)] for node in sorted({*ranks.nodes})],
        "collectives": [asdict(row) for row in rows],
        "members": names,
        "links": sorted(([*pair, value] for pair, value in figures.items()), key=lambda link: link[2])[:MAX_LINKS],
        "slow": [link.members for link in slow],
        "suspects": [{"members": suspect.members, "figures": suspect.figures} for suspect in suspects],
    }


def _collectives(
    ranks: Ranks, sizes: Sequence[int], probes: Collection[int], show: Callable[[str], None]
) -> tuple[list[collectives.Row], list[str]]:
    rows, findings = [], []
    show(f"{'COLLECTIVE':<15}{'SIZE':>10}{'TIME':>12}{'ALGBW':>10}{'BUSBW':>10}  GB/s")
    for name in collectives.FACTORS:
        row = None
        for size in sorted({*sizes, *probes}) if name == "all_reduce" else sizes:
            soon_s = row.seconds * size / row.bytes if row and row.seconds > LATENCY_S else 0.0
            if size not in probes and soon_s > LONGEST_S:
                show(f"{name:<15}{size_text(size):>10}  left out: a call would take {soon_s:.1f} s")
                continue
            row = collectives.measure(name, ranks, size)
            rows.append(row)
            wrong = "  WRONG" if row.wrong else ""
            show(
                f"{name:<15}{size_text(row.bytes):>10}{row.seconds * 1e3:>9.3f} ms"
                f"{row.algbw:>10.3g}{row.busbw:>10.3g}{wrong}"
            )
            for rank, number in row.wrong.items():
                where = f"rank {rank} on {ranks.node_name(rank)}"
                findings.append(f"{name} of {size_text(row.bytes)}: {number} elements are wrong on {where}")
    return rows, findings


def link_lines(figures: links.Figures, names: Sequence[str]) -> list[str]:
    """Return a table of the links' speeds or, with more than ``MATRIX`` nodes or ranks, a list of the slowest links."""
    title = f"Links, GB/s there and back; median {statistics.median(figures.values()):.3g}"
    if len(names) > MATRIX:
        slowest = sorted(figures.items(), key=lambda item: item[1])[:MATRIX]
        return [f"{title}; the slowest:", *(f"  {value:>8.3g}  {names[a]} - {names[b]}" for (a, b), value in slowest)]
    lines = [title]
    for a, name in enumerate(names):
        cells = (f"{figures[min(a, b), max(a, b)]:.3g}" if a != b else "-" for b in range(len(names)))
        lines.append(f"{name[:15]:<15}" + "".join(f"{cell:>8}" for cell in cells))
    return lines


def sentence(slow: links.Suspect, names: Sequence[str]) -> str:
    """Return a sentence that names the slow node or link, and says how slow it is."""
    own, beside = (f"{statistics.median(each):.3g}" for each in zip(*slow.figures, strict=True))
    if len(slow.members) == 1:
        return f"{names[slow.members[0]]} is slow: its best link reaches {own} GB/s, another one of its peer {beside}"
    a, b = (names[member] for member in slow.members)
    return f"the link between {a} and {b} is slow: {own} GB/s, while each of them reaches {beside} with another"


def size_text(number: int) -> str:
    """Return a size such as ``64 KiB``, rounded to 4 digits."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{number / (1 << power):.4g} {unit}"
    return f"{number} B"
