"""Measures the links: every two nodes exchange data. Before a slow link is reported, it is measured again on its own.

The order is that of a round-robin tournament. In each round, the nodes form pairs, and the nodes of a pair exchange
data. If the number of nodes is odd, one node waits. If there is only one node, its ranks exchange data instead. An
exchange sends data from one to the other and back. The figure of a pair is the bandwidth of the best of 4 to 10
exchanges. Other work on the machine can make an exchange slower, but never faster.

* A node is suspected if the best of its links is below half (``SLOW``) of the median of the other nodes' best links.
* A link is compared with the other links of each of its two nodes. It is suspected if its figure is below half of their
  median at both nodes.
* With fewer than 3 nodes, no node is suspected.
* A suspected node is measured again on its best link, which leads to another node. This link is compared with the best
  of the other links of that node.
* A suspected link is measured again. At each of its two nodes, it is compared with the best of the node's other links.
* All of these links are measured three times, one link at a time. Of the suspect's three figures, the best counts. Each
  of the three times, only the slowest of the other links counts. The suspect is reported if its best figure is below
  half of the median of these three slowest figures.
* If more than a third of the nodes, or of the links, are slow, the network has parts of different speed (racks, NVLink
  pairs). Then no comparison is possible, and none of these nodes or links is reported.
"""

import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddpcheck.collectives import Ranks

SLOW = 0.5
REPETITIONS = 3
EXCHANGES, EXCHANGE_S = (4, 10), 0.5  # the lowest and the highest number of exchanges, and the time for all of them
BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}
MAX_SUSPECTS = 8  # the slowest are measured again
Pair = tuple[int, int]  # indices of two members, the lower index first
Figures = Mapping[Pair, float]  # in GB/s (1e9 bytes per second)


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A node or a link that may be slow."""

    members: tuple[int, ...]  # one member: a node; two members: a link
    pair: Pair  # the pair to measure again
    beside: tuple[Pair, ...]  # the pairs to compare it with
    figures: tuple[tuple[float, float], ...] = ()  # measured again: of the pair, and the lowest of those beside it

    @property
    def is_slow(self) -> bool:
        """Whether the suspect, which was measured again, is to be reported as slow."""
        own, beside = zip(*self.figures, strict=True)
        return bool(max(own) < SLOW * statistics.median(beside))


def members_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the ranks that measure links: the first rank of each node or, on a single node, all ranks."""
    first = {node: rank for rank, node in reversed([*enumerate(ranks.nodes)])}
    return tuple(sorted(first.values())) if len(first) > 1 else tuple(range(ranks.size))


def rounds(number: int) -> Iterator[tuple[Pair, ...]]:
    """Yield the rounds of a round-robin tournament: each pair once, and no member twice in a round (circle method)."""
    order: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    half = len(order) // 2
    for _ in range(len(order) - 1):
        pairs = zip(order[:half], reversed(order[half:]), strict=True)
        yield tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        order = [order[0], order[-1], *order[1:-1]]


def measure(ranks: Ranks, members: Sequence[int], at_once: Sequence[Sequence[Pair]]) -> list[tuple[Pair, float]]:
    """Measure the groups of pairs in turn, and the pairs of a group in parallel. Every rank returns all figures."""
    own: list[float] = []
    for pairs in at_once:
        ranks.barrier()
        for a, b in pairs:
            if ranks.rank in (members[a], members[b]):
                first = ranks.rank == members[a]
                figure = _exchange(ranks, members[b] if first else members[a], first=first)
                own += [figure] if first else []
    figures = [iter(values) for values in ranks.gather(own)]
    return [((a, b), next(figures[members[a]])) for pairs in at_once for a, b in pairs]


def _exchange(ranks: Ranks, peer: int, *, first: bool) -> float:
    """Return the GB/s of the fastest exchange with ``peer``. The ``first`` rank sets the number of exchanges."""
    data = torch.zeros(BYTES[ranks.device.type] // 4, device=ranks.device)
    calls = data.new_full((1,), EXCHANGES[0])

    def once() -> float:
        started = time.perf_counter()
        for verb in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            verb(data, peer, group=ranks.group)
        ranks.synchronize()
        return time.perf_counter() - started

    seconds = once()
    calls.fill_(min(max(int(EXCHANGE_S / seconds), EXCHANGES[0]), EXCHANGES[1]))
    (dist.send if first else dist.recv)(calls, peer, group=ranks.group)
    return 2 * data.nbytes / min(once() for _ in range(int(calls))) / 1e9


def find_slow(
    ranks: Ranks, members: Sequence[int], figures: Figures
) -> tuple[tuple[Suspect, ...], tuple[Suspect, ...], tuple[str, ...]]:
    """Measure all suspects again. Return all suspects, the slow nodes and links among them, and notes.

    A note gives the reason if no node, or no link, can be named as slow.
    """
    suspects, *notes = suspected_nodes(figures, len(members))
    nodes = tuple(measure_again(ranks, members, suspect) for suspect in suspects)
    slow_nodes, note = confirmed(nodes, len(members), "nodes")
    suspects, *more = suspected_links(figures, len(members), [node.members[0] for node in slow_nodes])
    pairs = tuple(measure_again(ranks, members, suspect) for suspect in suspects)
    slow_links, last = confirmed(pairs, len(figures), "links")
    return (*nodes, *pairs), (*slow_nodes, *slow_links), tuple(filter(None, (*notes, note, *more, last)))


def confirmed(suspects: Sequence[Suspect], number: int, noun: str) -> tuple[tuple[Suspect, ...], str]:
    """Return the suspects that are slow again or, if no comparison is possible, an empty tuple and the reason."""
    slow = tuple(suspect for suspect in suspects if suspect.is_slow)
    if len(slow) > number / 3:
        return (), f"{len(slow)} of {number} {noun} are slower than the others: too many, so none of these is named"
    return slow, ""


def suspected_nodes(figures: Figures, number: int) -> tuple[tuple[Suspect, ...], str]:
    """Return the nodes that may be slow or, if no comparison is possible, an empty tuple and the reason."""
    if number < 3:
        return (), "with only two, there is no other link to compare with"
    speed = figures.__getitem__
    links = {node: [pair for pair in figures if node in pair] for node in range(number)}
    best = {node: max(map(speed, links[node])) for node in links}
    slow = [node for node in best if best[node] < SLOW * statistics.median(best[k] for k in best if k != node)]
    if _too_many(len(slow), number):
        return (), f"{len(slow)} of {number} nodes look slower than the others: too many, so no node is named"
    sound = {node: [pair for pair in links[node] if not {*pair} & {*slow} - {node}] for node in links}
    nodes = []
    for node in slow:
        pair = max(sound[node], key=speed)
        (partner,) = {*pair} - {node}
        nodes.append(Suspect(members=(node,), pair=pair, beside=(max(sound[partner], key=speed),)))
    return tuple(nodes), ""


def suspected_links(figures: Figures, number: int, slow: Collection[int]) -> tuple[tuple[Suspect, ...], str]:
    """Return the same for links, the slowest first. Links of the nodes in ``slow`` are left out."""
    speed = figures.__getitem__
    sound = {node: [pair for pair in figures if node in pair and not {*pair} & {*slow}] for node in range(number)}
    suspects = []
    for pair in (pair for pair in figures if not {*pair} & {*slow}):
        others = [[link for link in sound[end] if link != pair] for end in pair]
        if all(others) and speed(pair) < SLOW * min(statistics.median(map(speed, each)) for each in others):
            suspects.append(Suspect(members=pair, pair=pair, beside=tuple(max(each, key=speed) for each in others)))
    if _too_many(len(suspects), len(figures)):
        return (), f"{len(suspects)} of {len(figures)} links look slower than the others: too many, so no link is named"
    return tuple(sorted(suspects, key=lambda suspect: speed(suspect.pair)))[:MAX_SUSPECTS], ""


def _too_many(suspected: int, number: int) -> bool:
    """Return whether so many of ``number`` nodes or links are suspected that no comparison is possible.

    If there are more than MAX_SUSPECTS suspects, more than a third is too many. Otherwise only more than half is too
    many, because other work on the machine makes some first measurements slow.
    """
    return suspected > max(number / 3, min(number / 2, MAX_SUSPECTS))


def measure_again(ranks: Ranks, members: Sequence[int], suspect: Suspect) -> Suspect:
    """Measure a suspect and the links that it is compared with, one link at a time."""
    figures = []
    for _ in range(REPETITIONS):
        measured = dict(measure(ranks, members, [[pair] for pair in (suspect.pair, *suspect.beside)]))
        figures.append((measured[suspect.pair], min(measured[pair] for pair in suspect.beside)))
    return replace(suspect, figures=tuple(figures))
