"""The training loop. What it needs to know of anything else is a word in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddptrain.evaluate import count_right
from ddptrain.job import Job
from ddptrain.step import train_step
from ddptrain.stream import batches, epoch_order, share_of
from ddptrain.watch import Watch
from ddptrain.world import total


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """How a training ended."""

    step: int
    exit_code: int = 0  # other than 0: a stop was asked for
    right: int | None = None  # test samples classified rightly by the final weights; None: not counted
    images: int = 0  # trained here, over all ranks
    seconds: float = 0.0  # in which they were


def fit(
    job: Job, *, first_step: int, watch: Watch, due: Callable[[int], bool], save: Callable[[int, float | None], None]
) -> Fitted:
    """Train from ``first_step`` to the last, or until the ranks agree to stop; save on the way. Raises NonFinite."""
    place, epochs = job.world.place, job.options.training.epochs
    step, images, seconds, right = first_step, 0, 0.0, None
    for epoch in range(first_step // job.steps_per_epoch, epochs):
        start = time.monotonic()
        loss_sum = torch.zeros((), dtype=torch.float64, device=job.world.device)
        images_before = images
        order = epoch_order(len(job.train), seed=job.options.training.seed, epoch=epoch).to(job.world.device)
        for batch in batches(order, job.batch_size, first=step % job.steps_per_epoch):
            watch.began()
            lr = job.lr(step)
            share = share_of(batch, rank=place.rank, world_size=place.size)
            step += 1
            loss = train_step(job, share, step=step, epoch=epoch, lr=lr, phases=watch.phases, guard=watch.guard)
            loss_sum += loss * (len(batch) / place.size)
            images += len(batch)
            code = watch.ended(step=step, epoch=epoch + 1, samples=share.num_samples, lr=lr)
            speed = (images - images_before) / (time.monotonic() - start)
            watch.teller.step(step, job.num_steps, f"{epoch + 1}/{epochs}", speed)
            if code:
                watch.events.tell("stopping", step=step, code=code)
                watch.guard.prove()
                return Fitted(step=step, exit_code=code)
            if step % job.steps_per_epoch and due(step) and not watch.guard.tripped:
                save(step, None)
        watch.guard.prove()
        loss_mean = float(total(place, loss_sum)) / (images - images_before)
        epoch_seconds = time.monotonic() - start
        seconds += epoch_seconds
        evaluating = time.monotonic()
        with watch.ledger.lost("evaluation"):
            right = count_right(job)
        watch.heart.beat(step)
        accuracy = right / len(job.test)
        speed_of_epoch = (images - images_before) / epoch_seconds
        watch.metrics.epoch(loss=loss_mean, accuracy=accuracy, grad_norm=watch.guard.last_norm)
        watch.events.tell(
            "epoch_ended",
            step=step,
            seconds=epoch_seconds,
            epoch=epoch + 1,
            loss=round(loss_mean, 6),
            accuracy=round(accuracy, 6),
            images_per_s=round(speed_of_epoch, 1),
            evaluation_s=round(time.monotonic() - evaluating, 4),
        )
        job.board.epoch(step=step, loss=loss_mean, accuracy=accuracy, lr=lr, images_per_s=speed_of_epoch)
        watch.teller.say(
            f"epoch {epoch + 1:2}/{epochs}  loss {loss_mean:.4f}  test {100 * accuracy:6.2f} %  "
            f"{speed_of_epoch:6.0f} images/s  lr {lr:.4f}"
        )
        save(step, accuracy)
    return Fitted(step=step, right=right, images=images, seconds=seconds)
