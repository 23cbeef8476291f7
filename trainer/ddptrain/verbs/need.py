"""How much memory a training needs on each GPU, as sums that a person can check. Pure, without torch."""

from dataclasses import dataclass, replace

GIB = 1 << 30
MOMENTS = {"adamw": 2, "sgd": 1, "plain-sgd": 0}  # numbers that the optimizer keeps for a parameter
BYTES = {"fp32": 4, "amp": 4, "bf16": 2, "fp16": 2}  # of a parameter; amp: mixed precision, computed in 16 bits
LIBRARIES = 2 * GIB


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the sum; ``size`` None: not known."""

    what: str
    size: float | None
    how: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training as far as memory goes."""

    num_parameters: float
    optimizer: str
    dtype: str
    bucket_view: bool = False
    activations: float | None = None  # bytes; None: not known
    batch_size: int = 0
    state_bytes: float | None = None  # of the optimizer for a parameter, where not the usual
    shards_optimizer: int = 1  # ranks that share the optimizer's state
    shards_all: int = 1  # ranks that share everything

    def rows(self) -> tuple[Row, ...]:
        """The sum."""
        number, width = self.num_parameters, BYTES[self.dtype]
        moments = MOMENTS[self.optimizer]
        state = moments * width if self.state_bytes is None else self.state_bytes
        count = f"{number:,.0f} x"
        shared = f" / {self.shards_all} ranks" if self.shards_all > 1 else ""
        states_shared = shared or (f" / {self.shards_optimizer} ranks" if self.shards_optimizer > 1 else "")
        weights = number * width / self.shards_all
        rows = [
            Row(what="parameters", size=weights, how=f"{count} {width} bytes{shared}"),
            Row(what="gradients", size=weights, how=f"{count} {width} bytes{shared}"),
            Row(
                what="optimizer",
                size=number * state / self.shards_all / self.shards_optimizer,
                how=f"{count} {state:g} bytes: {moments} for each parameter ({self.optimizer}){states_shared}",
            ),
            Row(
                what="DDP's buckets",
                size=0.0 if self.bucket_view or self.shards_all > 1 else weights,
                how="none: gradients are views of them"
                if self.bucket_view
                else "none with FSDP"
                if self.shards_all > 1
                else f"{count} {width} bytes: a second copy of the gradients",
            ),
            Row(
                what="activations",
                size=self.activations,
                how=f"what the backward pass needs of a batch of {self.batch_size}"
                if self.activations is not None
                else "not known without --model and --batch-size",
            ),
        ]
        if self.dtype == "amp":
            rows.append(Row(what="16-bit copies", size=number * 2, how=f"{count} 2 bytes: autocast keeps them"))
        rows.append(Row(what="libraries", size=LIBRARIES, how="CUDA, cuBLAS, cuDNN, NCCL: an estimate"))
        return tuple(rows)

    def total(self) -> float:
        """Bytes, as far as they are known."""
        return sum(row.size or 0.0 for row in self.rows())


def helps(case: Case, *, ranks: int) -> tuple[tuple[str, Case], ...]:
    """What would need less, each with what it comes to."""
    ideas: list[tuple[str, Case]] = []
    if not case.bucket_view:
        ideas.append(("gradients as views of DDP's buckets (gradient_as_bucket_view)", replace(case, bucket_view=True)))
    if case.activations and case.batch_size > 1:
        half = replace(case, activations=case.activations / 2, batch_size=case.batch_size // 2)
        ideas.append((f"batches of {half.batch_size} on each rank", half))
    lean = replace(case, bucket_view=True)
    if case.optimizer == "adamw":
        ideas.append(("bucket views, and an 8-bit AdamW (bitsandbytes, torchao)", replace(lean, state_bytes=2.0)))
    if BYTES[case.dtype] == 4:
        ideas.append(("bucket views, and weights, gradients and moments in bf16", replace(lean, dtype="bf16")))
    if MOMENTS[case.optimizer]:
        sharded = replace(lean, shards_optimizer=ranks)
        ideas.append((f"bucket views, and ZeroRedundancyOptimizer on {ranks} ranks", sharded))
    ideas.append((f"FSDP instead of DDP on {ranks} ranks", replace(case, shards_all=ranks)))
    return tuple(ideas)


def told(case: Case, *, title: str, memory: float, ranks: int) -> str:
    """The answer, with its arithmetic."""
    rows = case.rows()
    lines = [f"{title}, on a GPU of {_gib(memory)}", ""]
    lines += [f"  {row.what:15} {_gib(row.size) if row.size is not None else '?':>11}   {row.how}" for row in rows]
    lines += [f"  {'together':15} {_gib(case.total()):>11}", ""]
    open_end = " and the activations" if case.activations is None else ""
    if case.total() <= memory:
        lines.append(f"it fits: {_gib(case.total())}{open_end} of {_gib(memory)}")
        return "\n".join(lines)
    lines += [f"it does not fit: {_gib(case.total())}{open_end} of {_gib(memory)}", "", "What would help:"]
    for idea, better in helps(case, ranks=ranks):
        verdict = "fits" if better.total() <= memory else "too much still"
        lines.append(f"  {_gib(better.total()):>11}  {verdict:15} {idea}")
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"
