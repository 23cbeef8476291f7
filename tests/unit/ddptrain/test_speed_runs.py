"""The tests of the recipes cifar10-94 and cifar10-96 are those of the published speed runs."""

import pytest
import torch
from torch.nn import functional

from ddptrain.config import parse_options
from ddptrain.data.datasets import SOURCES
from ddptrain.distributed import RankInfo, World
from ddptrain.train_loop import _test_views, evaluate
from ddptrain.training_state import TrainingState, build_training_state

LR_SHARE = 0.01  # of the published learning rates, which are for batches of 1,000 images and more


def build(recipe: str, *, size_px: int, batch_size: int, epochs: int, steps: int) -> TrainingState:
    """Build a training on synthetic images."""
    lr = parse_options([f"--recipe={recipe}"], {}).optimizer.lr * LR_SHARE
    shape, samples = f"--synthetic-shape=3x{size_px}x{size_px}", f"--synthetic-samples={batch_size * steps}"
    data = ("--data=synthetic", shape, samples)
    sizes = (f"--batch-size={batch_size}", f"--epochs={epochs}", f"--lr={lr}", "--precision=fp64")
    options = parse_options([f"--recipe={recipe}", *data, *sizes], {})
    world = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)
    return build_training_state(options, world, SOURCES["synthetic"].load(options.data, 0), batch_size=batch_size)


def test_six_views_of_a_test_image_are_weighted_as_published() -> None:
    images = torch.rand(2, 3, 5, 5)
    padded = functional.pad(images, (1,) * 4, "reflect")
    moved = (images, padded[:, :, :5, :5], padded[:, :, 2:, 2:])
    expected = [view for image in moved for view in (image, image.flip(3))]
    views = _test_views(images, parse_options(["--recipe=cifar10-94"], {}).training)
    assert [weight for weight, _ in views] == [0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    assert all(torch.equal(view, wanted) for (_, view), wanted in zip(views, expected, strict=True))


def test_the_loss_of_a_test_is_that_of_the_mean_logits() -> None:
    state = build("cifar10-94", size_px=17, batch_size=8, epochs=1, steps=2)
    evaluation, test = evaluate(state), state.data.test
    state.model.eval()
    with torch.no_grad():
        images = state.batch_builder.normalise(test.images_NHWC)
        logits = sum(weight * state.model(view) for weight, view in _test_views(images, state.options.training))
    loss = functional.cross_entropy(torch.as_tensor(logits), test.labels_N).item()
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)
    assert evaluation.num_predicted == len(test)
