"""A loss or a gradient that is no number: stopped before the optimizer's step, and named."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.messages import assert_names

from ddptrain.checkpoint import load_checkpoint


def test_a_training_that_diverges_ends_with_the_last_good_weights(train: Callable[..., list], tmp_path: Path) -> None:
    ended = train("--lr", "1e30", "--checkpoint-every", "1", "--epochs", "1")[0]
    assert ended.code == 65
    (failed,) = map(int, re.findall(r"step (\d+)", ended.err))
    line = re.sub(r"step \d+", "step N", re.sub(r"lr [0-9.e+]+\)", "lr N)", ended.err))
    assert_names(re.sub("the (loss is (nan|inf)|gradient is not finite) on", "WHAT on", line), "45", "rank 0", "--lr")
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    assert int(newest.name[5:13]) == failed - 1
    assert all(bool(weight.isfinite().all()) for weight in load_checkpoint(newest).parts["model"].values())
