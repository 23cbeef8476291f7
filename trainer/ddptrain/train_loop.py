# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""The training loop `train`, a training step, the evaluation, and the diagnosis of a step that was not finite.

On a GPU, a training step with a fused optimizer does not wait for the device. Shapes: B batch, K classes.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddptrain import compat
from ddptrain.callbacks import Callbacks, NonFiniteGuard
from ddptrain.config import TrainingOptions
from ddptrain.data.augment import Batch
from ddptrain.data.base import ImageDataset
from ddptrain.data.sampling import BatchShard, batches, epoch_order, seed_step, shard_sizes
from ddptrain.distributed import World, find_ddp, gather, sum_over_ranks
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddptrain.step_timing import Phases
from ddptrain.training_state import TrainingState
from ddpwire import metrics as catalogue
from ddpwire.communication import ACCURACY, parse_way
from ddpwire.events import events_of
from ddpwire.exits import Exit

# What a forward pass of an evaluation has at most. So its memory depends neither on the size of the test set nor on
# --batch-size. 4 million pixels are 3906 CIFAR images or 79 of ImageNet's size.
MAX_EVAL_IMAGES = 1000
MAX_EVAL_PIXELS = 4_000_000
MAX_EVAL_BYTES = 1 << 15  # of text


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The quality of predictions on the test set. A prediction is the class of an image or a byte of a text."""

    num_correct: int
    num_predicted: int
    loss: float  # the mean cross entropy of the predictions, in nats

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.num_correct / self.num_predicted

    @property
    def bits(self) -> float:
        """The loss in bits instead of nats."""
        return self.loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training ended."""

    step: int
    exit_code: int = 0  # other than 0: a stop was requested
    evaluation: Evaluation | None = None  # of the final weights; None: not evaluated
    num_images: int = 0  # trained by this process, over all ranks
    seconds: float = 0.0  # spent on training these images, without evaluation


def train(
    state: TrainingState,
    *,
    first_step: int,
    callbacks: Callbacks,
    due: Callable[[int], bool],
    save: Callable[[int, float | None], None],
) -> TrainResult:
    """Train from ``first_step`` until the last step or until all ranks stop. Save checkpoints. Raises NonFinite."""
    rank_info, epochs = state.world.rank_info, state.options.training.epochs
    step, images, seconds, evaluation = first_step, 0, 0.0, None
    for epoch in range(first_step // state.steps_per_epoch, epochs):
        # monotonic: a clock that is set back during an epoch would give a negative speed.
        start = time.monotonic()
        # On the device, so that no step waits for it. float64, so that the sum of many steps keeps its digits.
        loss_sum = torch.zeros((), dtype=torch.float64, device=state.world.device)
        images_before = images
        # The same on every rank, and a function of seed and epoch alone: a training that is resumed in the middle of an
        # epoch finds the same order. On the device, because a step takes its part of it there.
        order = epoch_order(len(state.data.train), seed=state.options.training.seed, epoch=epoch).to(state.world.device)
        for batch in batches(order, state.batch_size, first=step % state.steps_per_epoch):
            callbacks.phases.begin()
            # The learning rate counts steps from 0, all others count them from 1.
            lr = state.lr(step)
            shard = state.balance.shard_of(batch)
            step += 1
            loss = train_step(
                state, shard, step=step, epoch=epoch, lr=lr, phases=callbacks.phases, guard=callbacks.guard
            )
            # The mean of the ranks' losses is the mean loss of the batch (BatchShard). Times len(batch), it is the sum
            # of its samples' losses, so a smaller last batch counts less.
            loss_sum.add_(loss, alpha=len(batch) / rank_info.size)
            images += len(batch)
            # The answer of all ranks: a rank that stopped alone would leave the others in the next all-reduce.
            code = callbacks.on_step_end(step=step, epoch=epoch + 1, samples=shard.num_samples, lr=lr)
            if state.communication is not None and (choice := state.communication.measure(callbacks.phases)):
                callbacks.events.emit("communication_chosen", step=step, **choice)
                callbacks.progress.log(choice_message(choice))
            speed = (images - images_before) / (time.monotonic() - start)
            progress = f"{epoch + 1}/{epochs}", f"{speed:.0f} {state.data.noun}/s"
            callbacks.progress.step(step, state.num_steps, *progress)
            if code:
                callbacks.events.emit("stopping", step=step, code=code)
                # ``code`` may mean that a step was not finite, or the GPU has not reported one yet.
                callbacks.guard.raise_if_tripped()
                return TrainResult(step=step, exit_code=code)
            # The end of an epoch saves below, with the accuracy. ``tripped`` waits for the device, so it comes last.
            if step % state.steps_per_epoch and due(step) and not callbacks.guard.tripped:
                save(step, None)
        # A GPU reports such a step late. Here all ranks wait for the device anyway.
        callbacks.guard.raise_if_tripped()
        loss_mean = float(sum_over_ranks(rank_info, loss_sum)) / (images - images_before)
        # After float(), which waits for the device: before it, the last steps might not have been computed.
        epoch_seconds = time.monotonic() - start
        seconds += epoch_seconds
        evaluation_start = time.monotonic()
        with callbacks.goodput.time_lost("evaluation"):
            evaluation = evaluate(state)
        callbacks.heartbeat.beat(step)  # an evaluation sends none
        accuracy = evaluation.accuracy
        speed_of_epoch = (images - images_before) / epoch_seconds
        callbacks.metrics.epoch(loss=loss_mean, accuracy=accuracy, grad_norm=callbacks.guard.last_norm)
        callbacks.events.emit(
            "epoch_ended",
            step=step,
            seconds=epoch_seconds,
            epoch=epoch + 1,
            loss=round(loss_mean, 6),
            accuracy=round(accuracy, 6),
            images_per_s=round(speed_of_epoch, 1),
            evaluation_s=round(time.monotonic() - evaluation_start, 4),
        )
        if state.tensorboard is not None:
            scalars = {"train/loss": loss_mean, "test/accuracy": accuracy, "train/lr": lr}
            for name, value in {**scalars, "train/images_per_s": speed_of_epoch}.items():
                state.tensorboard.add_scalar(name, value, step)
            state.tensorboard.flush()  # a killed training keeps the curves of its whole epochs
        bits = "" if isinstance(state.data, ImageDataset) else f"{evaluation.bits:.4f} bits a byte  "
        callbacks.progress.log(
            f"epoch {epoch + 1:2}/{epochs}  loss {loss_mean:.4f}  test {100 * accuracy:6.2f} %  {bits}"
            f"{speed_of_epoch:6.0f} {state.data.noun}/s  lr {lr:.4f}"
        )
        # Before the save, because checkpoints contain the shares.
        if state.balance.is_measured and state.balance.adapt(callbacks.phases):
            shares = ":".join(map(str, state.balance.shares))
            callbacks.progress.log(f"the batches are now divided by the ranks' speeds: --balance {shares}")
        # Always, even if no checkpoint is due: only here is the accuracy known, which decides whether it is the best.
        save(step, accuracy)
    return TrainResult(step=step, evaluation=evaluation, num_images=images, seconds=seconds)


def choice_message(choice: Mapping[str, Any]) -> str:
    """Return a message about the way that ``--communication auto`` has chosen. See `Communication.measure`."""
    expected = ", ".join(f"{way} {seconds:.3g} s" for way, seconds in choice["expected_s"].items())
    return (
        f"communication {choice['way']} (--communication auto): a step computes for {choice['compute_s']:.3g} s, and "
        f"the ranks exchange {choice['bytes_per_s'] / 1e6:.3g} MB/s; expected per step: {expected}; "
        f"accuracy: {ACCURACY[parse_way(choice['way']).kind]}"
    )


def train_step(
    state: TrainingState, shard: BatchShard, *, step: int, epoch: int, lr: float, phases: Phases, guard: NonFiniteGuard
) -> Tensor:
    """Take optimizer step ``step`` (counted from 1) with this rank's shard of a global batch. Return the weighted loss.

    The device may not have computed the loss yet. Raises NonFinite on every rank. On a GPU perhaps some steps late, but
    the weights do not change after the step that was not finite (NonFiniteGuard).
    """
    batch = state.batch_builder.batch(shard.indices_N, epoch=epoch, mark=phases.mark)
    phases.mark("data")
    # For dropout: a step has the same random numbers in a training that was restarted, and each rank has its own. After
    # the batch, so that no random number drawn for the batch shifts them.
    seed_step(state.world.device, seed=state.options.training.seed, step=step, rank=state.world.rank_info.rank)
    loss = compute_gradients(state, batch, shard, phases=phases, guard=guard)
    optimizer_step(state, lr, step=step, phases=phases, guard=guard)
    if state.ema is not None:  # never together with a communication that changes weights
        state.ema.update(step)
    phases.mark("optimizer")
    if state.communication is not None:
        state.communication.after_step(step)
        phases.mark("comm_exposed")
    return loss


def compute_gradients(
    state: TrainingState, batch: Batch, shard: BatchShard, *, phases: Phases, guard: NonFiniteGuard
) -> Tensor:
    """Compute the gradients of all parameters, averaged over all ranks. Return the weighted loss.

    If the ranks exchange weights instead of gradients, the gradients are those of this rank's shard.
    """
    # Gradients become None instead of 0, so a parameter that this batch does not use is neither decayed nor moved.
    state.optimizer.zero_grad()
    losses = []
    parts = weighted_parts(batch, shard, state.options.training.accumulate, is_sharded=state.sharding is not None)
    is_local = state.communication is not None and state.communication.is_local
    # With auto, a local way is chosen when state.ddp is DDP already, which would exchange gradients. Otherwise,
    # state.ddp is the model, perhaps compiled.
    model = state.model if is_local and find_ddp(state.ddp) is not None else state.ddp
    ddp = find_ddp(model)
    for number, (part, weight) in enumerate(parts):
        is_last = number == len(parts) - 1
        # DDP averages the sum of the parts' gradients, once, in the last backward pass.
        with contextlib.nullcontext() if ddp is None or is_last else ddp.no_sync():
            part_loss = local_loss(state, model, part, weight)
            phases.mark("forward")
            # Only gradients are summed over the ranks, so a loss that is not finite on one rank reaches all as a NaN.
            scaler, checked = state.precision.scaler, guard.with_nan_gradient(part_loss)
            (checked if scaler is None else scaler.scale(checked)).backward()  # type: ignore[no-untyped-call]
            phases.mark("backward")
        losses.append(part_loss.detach())  # without the graph, which would keep memory
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()  # a usual step needs no kernel here


def local_loss(state: TrainingState, model: nn.Module, batch: Batch, weight: float) -> Tensor:
    """Return the weighted loss of a rank's batch. ``model`` is ``state.ddp``, or ``state.model`` for a diagnosis."""
    with state.precision.autocast(state.world.device):
        logits_BK = model(batch.inputs)
    return weighted_loss(logits_BK, batch, weight, state.options.training.label_smoothing)


def optimizer_step(state: TrainingState, lr: float, *, step: int, phases: Phases, guard: NonFiniteGuard) -> None:
    """Update the weights from the gradients. Raises NonFinite."""
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # groups of some recipes learn faster (optimizer.py)
    scaler, clip = state.precision.scaler, state.options.optimizer.clip
    if scaler is not None:
        scaler.unscale_(state.optimizer)  # clip and norm are for the gradients themselves
    # Also without clip, because the guard checks the norm.
    norm = nn.utils.get_total_norm(
        [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    )
    norm = compat.whole_tensor(norm)  # a sharded gradient has a part of its norm on each rank
    if clip:
        nn.utils.clip_grads_with_norm_(state.model.parameters(), clip, norm)
    if state.communication is not None:  # ranks with their own gradients must find a NaN in the same step
        phases.mark("optimizer")
        norm = state.communication.agree(norm)
        phases.mark("comm_exposed")
    # Before the weights change. With a scaler, an infinite norm is usual: the scale was too high, and the scaler skips
    # this step.
    guard.check(norm, state.optimizer, step=step, scaled=scaler is not None)
    if scaler is None:
        state.optimizer.step()
    else:
        scaler.step(state.optimizer)
        scaler.update()


def weighted_loss(logits_BK: Tensor, batch: Batch, weight: float, label_smoothing: float) -> Tensor:
    """Return the sum of the cross entropies of a shard, multiplied by ``weight``. See BatchShard."""
    logits_BK = _widened(logits_BK)
    if batch.labels_B.ndim > 1:  # each position of a window has a label; its loss is their mean
        weight /= batch.labels_B[0].numel()
        logits_BK, batch = logits_BK.flatten(0, 1), Batch(inputs=batch.inputs, labels_B=batch.labels_B.flatten())
    if batch.others_B is None or batch.own_B is None:
        total = functional.cross_entropy(logits_BK, batch.labels_B, reduction="sum", label_smoothing=label_smoothing)
        return weight * total
    own, other = (
        functional.cross_entropy(logits_BK, labels_B, reduction="none", label_smoothing=label_smoothing)
        for labels_B in (batch.labels_B, batch.others_B)
    )
    return weight * torch.lerp(other, own, batch.own_B.to(own.dtype)).sum()  # lerp needs equal dtypes


def _widened(logits: Tensor) -> Tensor:
    """Return logits of at least 32 bits: in bf16, a sum of losses has only 8 binary digits (--precision fp64 stays)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def weighted_parts(batch: Batch, shard: BatchShard, count: int, *, is_sharded: bool) -> list[tuple[Batch, float]]:
    """Return at most ``count`` parts of a batch with their weights.

    Sharded ranks exchange weights in each part of a batch, so all need the same number of parts. A rank with fewer
    parts repeats its last part with weight 0.
    """
    if count == 1:
        return [(batch, shard.weight)]
    size = min(count, len(batch.labels_B))
    columns = (batch.inputs, batch.labels_B, batch.others_B, batch.own_B)
    split = ([None] * size if column is None else column.tensor_split(size) for column in columns)
    parts = [
        (Batch(inputs=inputs, labels_B=labels_B, others_B=others_B, own_B=own_B), shard.weight)
        for inputs, labels_B, others_B, own_B in zip(*split, strict=True)
    ]
    num_missing = min(count, shard.most) - size if is_sharded else 0
    return parts + [(parts[-1][0], 0.0)] * num_missing


@torch.no_grad()
def evaluate(state: TrainingState) -> Evaluation:
    """Return the quality of the predictions on the test set. The result is the same on every rank.

    Every test sample counts once, for any number of ranks. Every rank runs the same number of forward passes, because
    sharded ranks exchange weights in them. A rank without samples evaluates sample 0, which does not count.
    """
    model, world, num_samples = state.model if state.ema is None else state.ema.model, state.world, len(state.data.test)
    _broadcast_buffers(model, world)
    was_training = model.training
    model.eval()
    # float64, because float32 counts only up to 2^24.
    totals = torch.zeros(3, dtype=torch.float64, device=world.device)  # correct predictions, predictions, their loss
    if isinstance(state.data, ImageDataset):
        count = min(MAX_EVAL_IMAGES, max(1, MAX_EVAL_PIXELS // state.data.shape.size_px**2))
    else:
        count = max(1, MAX_EVAL_BYTES // state.data.context)
    sizes, rank = shard_sizes(num_samples, state.balance.shares), world.rank_info.rank
    first, last = sum(sizes[:rank]), sum(sizes[: rank + 1])
    # max(sizes), not the own size: every rank takes part in every forward pass.
    for start in range(first, first + max(sizes), count):
        index_B = torch.arange(min(start, last), min(start + count, last))
        batch = state.batch_builder.test_batch(index_B if len(index_B) else torch.zeros(1, dtype=torch.int64))
        with state.precision.autocast(world.device):
            views = _test_views(batch.inputs, state.options.training)
            logits = torch.stack([weight * model(inputs) for weight, inputs in views]).sum(0)
        if len(index_B):
            # A text has the shape (B, positions, K): each position is a prediction.
            logits_PK, labels_P = _widened(logits).flatten(0, -2), batch.labels_B.flatten()
            loss = functional.cross_entropy(logits_PK, labels_P, reduction="none").double().sum()
            num_correct = (logits_PK.argmax(1) == labels_P).sum()
            totals += torch.stack([num_correct.double(), torch.full_like(loss, len(labels_P)), loss])
    model.train(was_training)
    num_correct, num_predicted, loss = sum_over_ranks(world.rank_info, totals).tolist()
    return Evaluation(num_correct=int(num_correct), num_predicted=int(num_predicted), loss=loss / num_predicted)


def _test_views(inputs: Tensor, options: TrainingOptions) -> list[tuple[float, Tensor]]:
    """Return the inputs that are evaluated, each with the weight of its logits, as cifar10-airbench does (recipes)."""
    views, shift, size_px = [(1.0, inputs)], options.test_shift, inputs.shape[-1]
    if shift:
        padded = functional.pad(inputs, (shift,) * 4, "reflect")
        moved = (padded[:, :, at : at + size_px, at : at + size_px] for at in (0, 2 * shift))
        views = [(0.5, inputs), *((0.25, images) for images in moved)]
    if options.test_flip:
        views = [(weight / 2, view) for weight, images in views for view in (images, images.flip(3))]
    return views


def _broadcast_buffers(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's buffers, such as batch norm statistics. DDP does this only before the next training step.

    Without it, the ranks would evaluate different models. A single rank has no group, and nothing to agree on.
    """
    if world.data_group is not None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0, group=world.data_group)


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """The results of a rank for its own shard of the batch, before any sum over the ranks."""

    loss: float
    gradient_finite: bool | None  # None: unknown, since a sharded gradient is summed over the ranks first


def diagnose_nonfinite(state: TrainingState, step: int, metrics: Metrics) -> TrainError:
    """Repeat the failed step, and return the error with the ranks that failed. Every rank must call this."""
    rank_info = state.world.rank_info
    mine = _recompute_step(state, step)
    # The loss first: where it is not finite, the gradient says nothing more.
    cause = "loss" if not math.isfinite(mine.loss) else "gradient" if mine.gradient_finite is False else None
    if cause is not None:
        metrics.count(catalogue.NONFINITE, "grad" if cause == "gradient" else cause)
        events_of(os.environ).emit("not_finite", step=step, what=cause)
    findings, lr = gather(rank_info, mine), state.lr(step - 1)  # lr counts steps from 0
    return TrainError(Exit.DATA, nonfinite_message(findings, step=step, num_steps=state.num_steps, lr=lr))


def nonfinite_message(findings: Sequence[RankFinding], *, step: int, num_steps: int, lr: float) -> str:
    """Return the error message. ``findings`` has one entry per rank, in the ranks' order."""
    losses = {rank: finding.loss for rank, finding in enumerate(findings) if not math.isfinite(finding.loss)}
    gradients = [
        rank for rank, finding in enumerate(findings) if finding.gradient_finite is False and rank not in losses
    ]
    parts = []
    if losses:
        values = "/".join(sorted({str(loss) for loss in losses.values()}))
        parts.append(f"the loss is {values} on {_rank_list([*losses], len(findings))}")
    if gradients:
        parts.append(f"the gradient is not finite on {_rank_list(gradients, len(findings))}")
    if not parts and findings[0].gradient_finite is None:
        parts.append("the gradient is not finite on an unknown rank, because it is sharded")
    reason = " and ".join(parts) or "each rank's own gradient is finite, but the norm of the gradient is not finite"
    return (
        f"step {step} of {num_steps} was not applied: {reason} (lr {lr:g}). The weights and all checkpoints are from "
        "before this step: try a lower --lr, or check the data"
    )


def _recompute_step(state: TrainingState, step: int) -> RankFinding:
    """Repeat this rank's part of step ``step`` (counted from 1), with the weights from before that step."""
    rank_info = state.world.rank_info
    epoch, index = divmod(step - 1, state.steps_per_epoch)
    order = epoch_order(len(state.data.train), seed=state.options.training.seed, epoch=epoch).to(state.world.device)
    shard = state.balance.shard_of(next(batches(order, state.batch_size, first=index)))
    state.optimizer.zero_grad()
    state.batch_builder.feed.rewind()  # its worker processes have gone past this batch
    batch = state.batch_builder.batch(shard.indices_N, epoch=epoch)
    seed_step(state.world.device, seed=state.options.training.seed, step=step, rank=rank_info.rank)
    loss = local_loss(state, state.model, batch, shard.weight)
    if state.sharding is not None:
        return RankFinding(loss=loss.item(), gradient_finite=None)
    # This rank's own gradients: backward would call DDP's hooks, which average them over the ranks.
    gradients = torch.autograd.grad(
        loss, [parameter for parameter in state.model.parameters() if parameter.requires_grad], allow_unused=True
    )
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
    return RankFinding(loss=loss.item(), gradient_finite=finite)


def _rank_list(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank" if size > 1 else "rank 0"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
