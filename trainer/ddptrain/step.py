"""One optimizer step, and nothing around it."""

from torch import Tensor
from torch.nn import functional

from ddptrain.augment import augment
from ddptrain.job import Job
from ddptrain.stream import Share, sample_hash


def train_step(job: Job, share: Share, *, epoch: int, lr: float) -> Tensor:
    """One optimizer step on this rank's share of a global batch; its weighted loss, not yet waited for."""
    options = job.options
    images = job.train.images_NCHW[share.indices_N]
    if options.data.augment:
        bits = sample_hash(share.indices_N, seed=options.training.seed, epoch=epoch)
        images = augment(images, bits, job.data.augmentation)
    logits = job.ddp(job.normalise(images))
    smoothing = options.training.label_smoothing
    loss = weighted_loss(logits, job.train.labels_N[share.indices_N], share.weight, smoothing)
    job.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    job.optimizer.step()
    return loss.detach()


def weighted_loss(logits: Tensor, labels: Tensor, weight: float, label_smoothing: float) -> Tensor:
    """Cross entropy, summed over the share and weighted as stream.Share says."""
    return weight * functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
