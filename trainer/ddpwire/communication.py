"""The ways in which ranks exchange gradients or weights, and a model of the bytes and the seconds of each way.

``ddptrain --communication`` uses the ways, ``ddpctl bench --advise`` compares them, and ``ddpctl explain`` names them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

AUTO: Final = "auto"  # measures the first steps, then uses one of CANDIDATES
# For each kind of way, what it costs in accuracy.
ACCURACY: Final[Mapping[str, str]] = {
    "plain": "exact",
    "bf16": "gradients are rounded to 8 significant bits",
    "fp16": "gradients are rounded to 11 significant bits, and overflow above 65,504",
    "powersgd": "ResNet-18, CIFAR-10: rank 1 93.6 %, 2 94.4 %, 4 94.5 %, plain 94.3 % (arXiv 1905.13727, table 3)",
    "localsgd": "the more steps between two averages, the more is lost, mostly early in a training (arXiv 1808.07217)",
    "diloco": "nothing lost in long trainings of language models (arXiv 2311.08105); 2.8 points in 450 steps of digits",
}
NUMBERED: Final = ("powersgd", "localsgd", "diloco")  # rank of the matrices, or steps per exchange
LOCAL: Final = ("localsgd", "diloco")  # ranks exchange weights, so weights differ between two exchanges
FLOAT_BYTES = 4
BUCKET_BYTES = 25 << 20  # DDP's default
BACKWARD_SHARE = 2 / 3  # of a step's computation; DDP exchanges gradients meanwhile
MIN_COMPRESSION = 2  # PowerSGD sends a matrix whole if it would become less than so many times smaller
# Per parameter and exchange, for copies, rounding, PowerSGD's products, and DiLoCo's step: measured on a CPU core, and
# not measured on a GPU, whose memory is at least 8 times as fast.
LOCAL_S: Final[Mapping[str, float]] = {
    "plain": 1.5e-9, "bf16": 3e-9, "fp16": 3e-9, "powersgd": 8e-9, "localsgd": 5e-9, "diloco": 1e-8,
}  # fmt: skip
GPU_FACTOR = 1 / 8
PROBES: Final = {4: 3, 4 << 20: 2}  # sizes of all-reduces that show a link's speed, and how often auto times each
# See `choose`. DiLoCo must be worth more, because it loses accuracy in a short training.
WORTH: Final = {"plain": 1.0, "bf16": 1.25, "powersgd": 1.25, "diloco": 2.0}
NEAR: Final = 1.05
MATRIX = (512, 2304)  # assumed shape of the parameters if only their number is known: a convolution of a ResNet


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way, such as ``powersgd:4``. ``number`` is 0 for kinds without a number."""

    kind: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.number else self.kind

    @property
    def is_local(self) -> bool:
        """Whether the ranks' weights differ between two exchanges."""
        return self.kind in LOCAL


@dataclass(frozen=True, kw_only=True)
class Link:
    """The speed of all-reduces between ``num_ranks`` ranks: a call with S bytes takes ``seconds(S)``."""

    num_ranks: int
    latency_s: float
    bytes_per_s: float  # the bus bandwidth, as in nccl-tests

    def seconds(self, num_bytes: float) -> float:
        """Return the duration of an all-reduce."""
        return self.latency_s + sent_bytes(num_bytes, self.num_ranks) / self.bytes_per_s


def fit_link(num_ranks: int, seconds: Mapping[int, float]) -> Link:
    """Return the speed of all-reduces, given the durations for a small and a large size in bytes."""
    latency_s, large = seconds[min(seconds)], max(seconds)
    transfer_s = max(1e-9, seconds[large] - latency_s)
    return Link(num_ranks=num_ranks, latency_s=latency_s, bytes_per_s=sent_bytes(large, num_ranks) / transfer_s)


def parse_way(text: str) -> Way:
    """Return the way that ``text`` names. ``none`` is an old name of ``plain``. Raises ValueError."""
    kind, colon, number = text.partition(":")
    kind = "plain" if text == "none" else kind
    is_numbered = kind in NUMBERED
    is_valid = number.isdecimal() and 0 < int(number) < 1 << 31 if is_numbered else not colon
    if kind not in ACCURACY or not is_valid:
        names = "plain, bf16, fp16, powersgd:RANK, localsgd:STEPS, diloco:STEPS or auto"
        raise ValueError(f"{text!r} is not {names}; RANK and STEPS are at least 1")
    return Way(kind=kind, number=int(number) if is_numbered else 0)


CANDIDATES: Final = tuple(map(parse_way, ("plain", "bf16", "powersgd:4", "diloco:32")))  # most exact first
ADVISED: Final = (*CANDIDATES[:2], *map(parse_way, ("powersgd:1", "powersgd:4", "localsgd:8", "diloco:32")))


def sent_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return how many bytes each rank sends in an all-reduce, at best."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def exchanged_bytes(way: Way, shapes: Sequence[Sequence[int]]) -> float:
    """Return the size of the data that the ranks all-reduce per step, on average. ``shapes`` are of the parameters."""
    numbers = [math.prod(shape) for shape in shapes]
    if way.kind == "powersgd":
        for index, shape in enumerate(shapes):
            rows, columns = shape[0] if shape else 1, numbers[index] // max(1, shape[0] if shape else 1)
            compressed = (rows + columns) * min(rows, columns, way.number)
            if MIN_COMPRESSION * compressed < numbers[index]:
                numbers[index] = compressed
    divisor = {"bf16": 2, "fp16": 2, "localsgd": way.number, "diloco": way.number}.get(way.kind, 1)
    return FLOAT_BYTES * sum(numbers) / divisor


def step_seconds(
    way: Way, shapes: Sequence[Sequence[int]], link: Link, *, compute_s: float, device: str = "cpu"
) -> float:
    """Return the expected duration of a step. ``compute_s`` is the duration of a step without communication."""
    size, total = exchanged_bytes(way, shapes), exchanged_bytes(CANDIDATES[0], shapes)
    num_buckets = max(1, math.ceil(total / BUCKET_BYTES))
    local_s = LOCAL_S[way.kind] * total / FLOAT_BYTES * (1 if device == "cpu" else GPU_FACTOR)
    if way.is_local:  # each step also exchanges whether the gradients are finite
        return compute_s + link.latency_s + (local_s + link.seconds(size * way.number)) / way.number
    if way.kind == "powersgd":  # three all-reduces per bucket
        return compute_s + local_s + 2 * num_buckets * link.latency_s + link.seconds(size)
    exchange_s = link.seconds(size) + (num_buckets - 1) * link.latency_s
    last_s = exchange_s * min(1.0, BUCKET_BYTES / max(1.0, total))  # its gradients are ready last
    return compute_s + local_s + max(last_s, exchange_s - BACKWARD_SHARE * compute_s)


def choose(shapes: Sequence[Sequence[int]], link: Link, *, compute_s: float, device: str = "cpu") -> dict[Way, float]:
    """Return the expected seconds per step of each candidate, with the way to use first.

    Plain, and each way that is ``WORTH`` times as fast as plain, can be used. Of these, it is the most exact one that
    takes at most ``NEAR`` times as long as the fastest.
    """
    seconds = {way: step_seconds(way, shapes, link, compute_s=compute_s, device=device) for way in CANDIDATES}
    plain_s = seconds[CANDIDATES[0]]
    usable = {way: way_s for way, way_s in seconds.items() if plain_s >= WORTH[way.kind] * way_s}
    chosen = next(way for way, way_s in usable.items() if way_s <= NEAR * min(usable.values()))
    return {chosen: seconds[chosen], **seconds}


def matrices(num_parameters: float) -> list[tuple[int, int]]:
    """Return shapes with about so many parameters, if the true shapes are unknown."""
    size = math.prod(MATRIX)
    full, rest = divmod(round(num_parameters), size)
    return [MATRIX] * full + ([(MATRIX[0], -(-rest // MATRIX[0]))] if rest else [])
