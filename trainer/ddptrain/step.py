# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""One optimizer step, and nothing around it. Nothing here waits for the device. Shapes: B batch, K classes."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddptrain.guard import Guard
from ddptrain.input.batches import Batch
from ddptrain.job import Job
from ddptrain.phases import Phases
from ddptrain.stream import Share


def train_step(job: Job, share: Share, *, step: int, epoch: int, lr: float, phases: Phases, guard: Guard) -> Tensor:
    """Optimizer step number ``step``, from 1, on this rank's share of a global batch; its weighted loss, not yet
    waited for. Raises NonFinite, on every rank and before the optimizer's step.
    """
    batch = job.preparation.batch(share.indices_N, epoch=epoch, mark=phases.mark)
    phases.mark("data")
    loss = gradients(job, batch, share.weight, phases=phases, guard=guard)
    update(job, lr, step=step, guard=guard)
    if job.ema is not None:
        job.ema.update(step)
    phases.mark("optimizer")
    return loss


def gradients(job: Job, batch: Batch, weight: float, *, phases: Phases, guard: Guard) -> Tensor:
    """Have every parameter carry its gradient, over all ranks; the weighted loss."""
    job.optimizer.zero_grad()
    loss = torch.zeros((), device=batch.labels_B.device)
    parts = list(_parts(batch, job.options.training.accumulate))
    for number, part in enumerate(parts):
        with _no_sync(job.ddp) if number < len(parts) - 1 else contextlib.nullcontext():
            part_loss = local_loss(job, job.ddp, part, weight)
            phases.mark("forward")
            scaler, guarded = job.precision.scaler, guard.loss(part_loss)
            (guarded if scaler is None else scaler.scale(guarded)).backward()  # type: ignore[no-untyped-call]
            phases.mark("backward")
        loss = loss + part_loss.detach()
    return loss


def local_loss(job: Job, model: nn.Module, batch: Batch, weight: float) -> Tensor:
    """The weighted loss of a rank's batch, by ``job.ddp`` or, without the other ranks, by ``job.model``."""
    with job.precision.autocast(job.world.device):
        logits_BK = model(batch.images_BCHW)
    return weighted_loss(logits_BK, batch, weight, job.options.training.label_smoothing)


def update(job: Job, lr: float, *, step: int, guard: Guard) -> None:
    """Take the step that the gradients say. Raises NonFinite."""
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    scaler, clip = job.precision.scaler, job.options.optimizer.clip
    if scaler is not None:
        scaler.unscale_(job.optimizer)
    if clip:
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), clip)
    else:
        norm = nn.utils.get_total_norm([one.grad for one in job.model.parameters() if one.grad is not None])
    guard.gradient(norm, job.optimizer, step=step, scaled=scaler is not None)
    if scaler is None:
        job.optimizer.step()
    else:
        scaler.step(job.optimizer)
        scaler.update()


def weighted_loss(logits_BK: Tensor, batch: Batch, weight: float, label_smoothing: float) -> Tensor:
    """Cross entropy, summed over the share and weighted as stream.Share says."""
    logits_BK = logits_BK if logits_BK.dtype == torch.float64 else logits_BK.float()
    if batch.others_B is None or batch.own_B is None:
        total = functional.cross_entropy(logits_BK, batch.labels_B, reduction="sum", label_smoothing=label_smoothing)
        return weight * total
    own, other = (
        functional.cross_entropy(logits_BK, labels_B, reduction="none", label_smoothing=label_smoothing)
        for labels_B in (batch.labels_B, batch.others_B)
    )
    return weight * torch.lerp(other, own, batch.own_B.to(own.dtype)).sum()


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """The batch in so many parts, or fewer where it has fewer images."""
    if count == 1:
        yield batch
        return
    count = min(count, len(batch.labels_B))
    images, labels = batch.images_BCHW.tensor_split(count), batch.labels_B.tensor_split(count)
    others, own = ([None] * count if row is None else row.tensor_split(count) for row in (batch.others_B, batch.own_B))
    for part in zip(images, labels, others, own, strict=True):
        yield Batch(images_BCHW=part[0], labels_B=part[1], others_B=part[2], own_B=part[3])


def _no_sync(ddp: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients are added up here before they travel."""
    inner = getattr(ddp, "_orig_mod", ddp)  # what torch.compile wraps
    if isinstance(inner, DistributedDataParallel):
        return inner.no_sync()
    return contextlib.nullcontext()
