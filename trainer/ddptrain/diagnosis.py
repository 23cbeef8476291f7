"""What was not finite in a step that was not taken, and on which ranks: found by computing it once more."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddptrain.errors import TrainError
from ddptrain.job import Job
from ddptrain.metrics import Metrics
from ddptrain.step import local_loss
from ddptrain.stream import batches, epoch_order, share_of
from ddpwire.exits import Exit


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rank finds with its own share of the batch, before anything is summed over the ranks."""

    loss: float
    gradient_finite: bool

    @property
    def loss_finite(self) -> bool:
        """Whether the loss is a number."""
        return self.loss - self.loss == 0


def nonfinite(job: Job, step: int, metrics: Metrics) -> TrainError:
    """The error that ends the training, the same on every rank. To be called by every rank."""
    place = job.world.place
    mine = _look(job, step)
    if not mine.loss_finite:
        metrics.nonfinite("loss")
    elif not mine.gradient_finite:
        metrics.nonfinite("grad")
    findings = [mine] * place.size
    if place.size > 1:
        dist.all_gather_object(findings, mine)
    return TrainError(Exit.DATA, told(findings, step=step, num_steps=job.num_steps, lr=job.lr(step - 1)))


def told(findings: Sequence[Finding], *, step: int, num_steps: int, lr: float) -> str:
    """One line for a person. ``findings``: by rank."""
    losses = [rank for rank, one in enumerate(findings) if not one.loss_finite]
    gradients = [rank for rank, one in enumerate(findings) if one.loss_finite and not one.gradient_finite]
    parts = []
    if losses:
        values = "/".join(sorted({str(findings[rank].loss) for rank in losses}))
        parts.append(f"the loss is {values} on {_ranks(losses, len(findings))}")
    if gradients:
        parts.append(f"the gradient is not finite on {_ranks(gradients, len(findings))}")
    what = " and ".join(parts) or "the gradient's norm is not finite, though each rank's share of it is"
    return (
        f"step {step} of {num_steps} was not taken: {what} (lr {lr:g}); the weights are those of step {step - 1}, "
        "and no checkpoint has seen it: try a lower --lr, or look at the data"
    )


def _look(job: Job, step: int) -> Finding:
    """The share of step number ``step``, from 1, once more; the weights have not changed since."""
    place = job.world.place
    epoch, index = divmod(step - 1, job.steps_per_epoch)
    order = epoch_order(len(job.train), seed=job.options.training.seed, epoch=epoch).to(job.world.device)
    share = share_of(next(batches(order, job.batch_size, first=index)), rank=place.rank, world_size=place.size)
    job.optimizer.zero_grad()
    job.preparation.feed.rewind()
    batch = job.preparation.batch(share.indices_N, epoch=epoch)
    loss = local_loss(job, job.model, batch, share.weight)
    gradients = torch.autograd.grad(
        loss, [one for one in job.model.parameters() if one.requires_grad], allow_unused=True
    )
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
    return Finding(loss=loss.item(), gradient_finite=finite)


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank" if size > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
