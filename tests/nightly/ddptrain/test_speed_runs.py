"""The recipes cifar10-94 and cifar10-96 train as a plain implementation of the published speed runs does."""

import math
from collections.abc import Iterator

import pytest
import torch
from tests.unit.ddptrain.test_augment import LR_SHARE, build
from torch import Tensor
from torch.nn import functional

from ddptrain.callbacks import NonFiniteGuard
from ddptrain.data import sampling
from ddptrain.data.sampling import batches, epoch_order, sample_hash, shard_of
from ddptrain.step_timing import Phases
from ddptrain.train_loop import train_step
from ddptrain.training_state import TrainingState


def losses(state: TrainingState) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    step, guard = 0, NonFiniteGuard(torch.device("cpu"))
    for epoch in range(state.options.training.epochs):
        for batch in batches(epoch_order(len(state.data.train), seed=0, epoch=epoch), state.batch_size, first=0):
            shard, lr = shard_of(batch, rank=0, shares=(1,)), state.lr(step)
            step += 1
            yield train_step(state, shard, step=step, epoch=epoch, lr=lr, phases=Phases(), guard=guard).item()


def whitening(images: Tensor) -> Tensor:
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + 5e-4).sqrt()).T.view(-1, 3, 2, 2)
    return torch.cat([filters, -filters])


def plain_losses(state: TrainingState, weights: dict[str, Tensor], *, deep: bool) -> Iterator[float]:  # noqa: C901
    """Train as the published scripts do, with their learning rates for a sum of losses.

    Only the initial weights, the normalised images and the random numbers are ddptrain's.
    """
    train, batch_size, num_steps = state.data.train, state.batch_size, state.num_steps
    pad, size, images = 4 if deep else 2, train.images_NHWC.shape[1], state.batch_builder.normalise(train.images_NHWC)
    assert torch.allclose(whitening(images), weights["stem.weight"], atol=1e-5)
    convs = sorted(name for name in weights if "convs" in name)
    biases = sorted(name for name in weights if name.endswith("bias"))
    lr = LR_SHARE * (9 / (1 + 1 / 0.15) if deep else 0.67 * 2000 * (9 / 256) ** 2)
    decay = LR_SHARE * (0.012 / (1 + 1 / 0.15) if deep else 2e-6 * 2000)
    groups = [{"params": [weights[name] for name in biases], "lr": 64 * lr if deep else LR_SHARE * 0.053 * 2000}]
    groups.append({"params": [weights["head.weight"], *(weights[name] for name in convs if deep)], "lr": lr})
    optimizers = [torch.optim.SGD(groups, momentum=0.85, nesterov=True)]
    for group in optimizers[0].param_groups:
        group["weight_decay"] = decay / group["lr"]
    if not deep:
        matrices = [weights[name] for name in convs]
        optimizers.append(torch.optim.Muon(matrices, lr=LR_SHARE * 0.24, weight_decay=0, momentum=0.6, ns_steps=3))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks, warm_up = [group["lr"] for group in groups], min(round(3.7 * len(train) / batch_size), num_steps - 1) * deep

    def forward(x: Tensor) -> Tensor:
        shortcut = x
        x = functional.gelu(functional.conv2d(x, weights["stem.weight"], weights["stem.bias"]))
        for group in range(3):
            for number in range(3 if deep else 2):
                filters = weights[f"groups.{group}.convs.{number}.weight"].unflatten(1, (3, 3, -1)).permute(0, 3, 1, 2)
                y = functional.conv2d(x, filters, padding=1)
                y = functional.max_pool2d(y, 2) if number == 0 else y
                bias = weights[f"groups.{group}.norms.{number}.bias"]
                y = functional.batch_norm(y, None, None, None, bias, training=True, eps=1e-12)
                x = functional.gelu(y + shortcut if number == 2 else y)
                shortcut = x if number == 0 else shortcut
        return functional.max_pool2d(x, (size - 1) // 8).flatten(1) @ weights["head.weight"].T / 9

    for step in range(num_steps):
        epoch, at = divmod(step * batch_size, len(train))
        index = epoch_order(len(train), seed=0, epoch=epoch)[at : at + batch_size]
        bits, first = sample_hash(index, seed=0, epoch=epoch), sample_hash(index, seed=0, epoch=0)
        padded = functional.pad(images[index], (pad,) * 4, "reflect")
        places = zip(*sampling.crop_offset(bits, 2 * pad + 1), sampling.is_mirrored(first), strict=True)
        crops = [image[:, y : y + size, x : x + size] for image, (y, x, _) in zip(padded, places, strict=True)]
        mirrored = sampling.is_mirrored(first) != epoch % 2
        inputs = torch.stack([crop.flip(2) if flip else crop for crop, flip in zip(crops, mirrored, strict=True)])
        for number, image in enumerate(inputs if deep else ()):
            y, x = (int(sampling.uniform(bits, of)[number] * size) - 6 for of in (sampling.CUT_TOP, sampling.CUT_LEFT))
            image[:, max(y, 0) : y + 12, max(x, 0) : x + 12] = 0
        loss = functional.cross_entropy(forward(inputs), train.labels_N[index], label_smoothing=0.2)
        yield loss.item()
        for group, peak in zip(groups, peaks, strict=True):
            falling = 1 - (step - warm_up) / (num_steps - warm_up)
            group["lr"] = peak * ((step + 1) / (warm_up + 1) if step < warm_up else falling)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for weight in () if deep else matrices:
            weight.data.mul_(math.sqrt(len(weight)) / weight.data.norm())
        for optimizer in optimizers:
            optimizer.step()


def compare(recipe: str, *, size_px: int, batch_size: int, epochs: int, steps: int, rel: float) -> None:
    """Check that both ways of training have the same losses in each of ``epochs`` epochs of ``steps`` steps."""
    state = build(recipe, size_px=size_px, batch_size=batch_size, epochs=epochs, steps=steps)
    weights = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    for name, value in state.model.named_parameters():
        weights[name].requires_grad = value.requires_grad
    pairs = [*zip(losses(state), plain_losses(state, weights, deep=recipe == "cifar10-96"), strict=True)]
    assert len(pairs) == epochs * steps
    assert all(ours == pytest.approx(plain, rel=rel) for ours, plain in pairs)


# torch's Muon computes in bf16, so the last bits of a loss grow.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "batch_size", "rel"), [("cifar10-94", 8, 1e-3), ("cifar10-96", 2, 1e-6)])
def test_the_losses_of_50_steps_equal_those_of_a_plain_implementation(recipe: str, batch_size: int, rel: float) -> None:
    compare(recipe, size_px=32, batch_size=batch_size, epochs=5, steps=10, rel=rel)


@pytest.mark.parametrize("recipe", ["cifar10-94", "cifar10-96"])
def test_losses_equal_those_of_a_plain_implementation(recipe: str) -> None:
    compare(recipe, size_px=17, batch_size=4, epochs=2, steps=2, rel=1e-6)
