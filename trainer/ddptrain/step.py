"""One optimizer step, and nothing around it."""

from torch import Tensor, nn
from torch.nn import functional

from ddptrain.augment import augment
from ddptrain.guard import Guard
from ddptrain.job import Job
from ddptrain.phases import Phases
from ddptrain.stream import Share, sample_hash


def train_step(job: Job, share: Share, *, step: int, epoch: int, lr: float, phases: Phases, guard: Guard) -> Tensor:
    """Optimizer step number ``step``, from 1, on this rank's share of a global batch; its weighted loss, not yet
    waited for. Raises NonFinite, on every rank and before the optimizer's step.
    """
    images = batch_images(job, share, epoch=epoch)
    phases.mark("data")
    loss = local_loss(job, job.ddp, images, share)
    phases.mark("forward")
    job.optimizer.zero_grad()
    guard.loss(loss).backward()  # type: ignore[no-untyped-call]
    phases.mark("backward")
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    gradients = [parameter.grad for parameter in job.model.parameters() if parameter.grad is not None]
    guard.gradient(gradients, job.optimizer, step=step)
    job.optimizer.step()
    phases.mark("optimizer")
    return loss.detach()


def batch_images(job: Job, share: Share, *, epoch: int) -> Tensor:
    """The share's images as the model sees them in this epoch."""
    images = job.train.images_NCHW[share.indices_N]
    if job.options.data.augment:
        bits = sample_hash(share.indices_N, seed=job.options.training.seed, epoch=epoch)
        images = augment(images, bits, job.data.augmentation)
    return job.normalise(images)


def local_loss(job: Job, model: nn.Module, images: Tensor, share: Share) -> Tensor:
    """The weighted loss of this rank's share, by ``job.ddp`` or ``job.model``."""
    labels = job.train.labels_N[share.indices_N]
    return weighted_loss(model(images), labels, share.weight, job.options.training.label_smoothing)


def weighted_loss(logits: Tensor, labels: Tensor, weight: float, label_smoothing: float) -> Tensor:
    """Cross entropy, summed over the share and weighted as stream.Share says."""
    return weight * functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
