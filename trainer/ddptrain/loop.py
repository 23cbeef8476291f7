"""The training loop. What it needs to know of anything else is a word in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddptrain.evaluate import count_right
from ddptrain.job import Job
from ddptrain.metrics import Metrics
from ddptrain.step import train_step
from ddptrain.stream import batches, epoch_order, share_of
from ddptrain.world import total
from ddpwire.heartbeat import Heart

SAY_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """How a training ended."""

    step: int
    exit_code: int = 0  # other than 0: a signal asked for it
    right: int | None = None  # test samples classified rightly by the final weights; None: not counted
    images: int = 0  # trained here, over all ranks
    seconds: float = 0.0  # in which they were


def fit(
    job: Job,
    *,
    first_step: int,
    exit_code: Callable[[], int],
    heart: Heart,
    metrics: Metrics,
    say: Callable[[str], None],
    save: Callable[[int], None],
) -> Fitted:
    """Train from ``first_step`` to the last, or until the ranks agree on an ``exit_code``; save on the way."""
    options, place, epochs = job.options, job.world.place, job.options.training.epochs
    step, images, seconds, right = first_step, 0, 0.0, None
    for epoch in range(first_step // job.steps_per_epoch, epochs):
        start = said = time.monotonic()
        loss_sum = torch.zeros((), dtype=torch.float64, device=job.world.device)
        images_before = images
        order = epoch_order(len(job.train), seed=options.training.seed, epoch=epoch).to(job.world.device)
        for batch in batches(order, job.batch_size, first=step % job.steps_per_epoch):
            began = time.monotonic()
            lr = job.lr(step)
            share = share_of(batch, rank=place.rank, world_size=place.size)
            loss_sum += train_step(job, share, step=step, epoch=epoch, lr=lr) * (len(batch) / place.size)
            step += 1
            images += len(batch)
            code = exit_code()
            heart.beat(step)
            now = time.monotonic()
            metrics.step(step=step, epoch=epoch + 1, samples=share.num_samples, seconds=now - began, lr=lr)
            if now - said > SAY_EVERY_S:
                said = now
                speed = (images - images_before) / (now - start)
                say(f"epoch {epoch + 1:2}/{epochs}   step {step} of {job.num_steps}   {speed:.0f} images/s")
            if code:
                return Fitted(step=step, exit_code=code)
            if options.checkpoints.every and step % options.checkpoints.every == 0 and step % job.steps_per_epoch:
                save(step)
        loss = float(total(place, loss_sum)) / (images - images_before)
        epoch_seconds = time.monotonic() - start
        seconds += epoch_seconds
        right = count_right(job)
        heart.beat(step)
        metrics.epoch(loss=loss, accuracy=right / len(job.test))
        speed = (images - images_before) / epoch_seconds
        job.board.epoch(step=step, loss=loss, accuracy=right / len(job.test), lr=lr, images_per_s=speed)
        say(
            f"epoch {epoch + 1:2}/{epochs}  loss {loss:.4f}  test {100 * right / len(job.test):6.2f} %  "
            f"{(images - images_before) / epoch_seconds:6.0f} images/s  lr {lr:.4f}"
        )
        save(step)
    return Fitted(step=step, right=right, images=images, seconds=seconds)
