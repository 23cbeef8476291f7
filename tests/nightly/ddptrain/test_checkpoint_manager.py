"""Where a training starts, and what is refused. One process, a tiny training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain import test_checkpoint_manager
from tests.unit.ddptrain.test_checkpoint_manager import TINY, Run, saved

from ddptrain.checkpoint import load_checkpoint, write_checkpoint

tiny = test_checkpoint_manager.tiny  # the fixture
FULL_DISK = """
import resource, runpy, sys
sys.dont_write_bytecode = True  # a torn .pyc would outlive the test
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, resource.RLIM_INFINITY))
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


def test_a_disk_that_fills_up_stops_no_step(train: Callable[..., list], tmp_path: Path) -> None:
    """A limit on files' size, which the kernel enforces as it does a full disk."""
    ended = train(*TINY, "--epochs=2", command=("-c", FULL_DISK))[0]
    assert ended.code == 73
    assert [line.split()[0] for line in ended.out.splitlines()] == ["simple", "epoch", "epoch"]
    assert_names(ended.err, "checkpoints/step-00000004.pt", "checkpoints/step-00000008.pt")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]


def test_fewer_epochs_are_reported(tiny: Run) -> None:
    tiny("--epochs=4", "--keep=0")
    for step in ("8", "12", "16"):
        Path(f"checkpoints/step-{step:0>8}.pt").unlink()
        Path(f"checkpoints/step-{step:0>8}.json").unlink()
    code, out, _ = tiny("--epochs=2")
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert_names(out[1], "checkpoints/step-00000004.pt", "5", "8", "2", "learning-rate")
    code, out, _ = tiny("--epochs=1")
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert_names(out[1], "checkpoints/step-00000008.pt", "4", "--epochs", "--checkpoint-dir")


def test_no_epochs_evaluate_and_write_nothing(tiny: Run) -> None:
    code, out, err = tiny("--epochs=0")
    assert (code, len(err)) == (66, 1)
    assert_names(err[0], "--epochs", "0", "checkpoints", "--resume", "--checkpoint-dir", "--pretrained")
    _, trained, _ = tiny()
    code, out, err = tiny("--epochs=0", "--resume=checkpoints/step-00000004.pt", "--checkpoint-dir=other")
    assert (code, err, saved("other")) == (0, [], [])
    assert_names(out[1], "checkpoints/step-00000004.pt", "--epochs")
    code, out, _ = tiny("--epochs=0")
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert (out[-2:], out[-4]) == (trained[-2:], trained[-4])
    assert_names(out[-3], "images/s")


def test_nor_where_only_those_that_were_set_aside_are_left(tiny: Run) -> None:
    tiny("--epochs=1")
    for name in ("step-00000004.pt", "step-00000004.json"):
        Path("checkpoints", name).rename(Path("checkpoints", name + ".bad"))
    code, _, err = tiny()
    assert (code, len(err)) == (65, 1)
    assert_names(err[0], "checkpoints", "1", "0", "--checkpoint-dir")


def test_weights_that_do_not_fit_are_one_line(tiny: Run) -> None:
    tiny("--epochs=1")
    code, _, err = tiny("--synthetic-shape=1x12x12", "--allow-changed-config")
    assert (code, len(err)) == (78, 2)
    message, reason = err[1].split(": Error(s) in loading ", 1)
    assert reason
    assert_names(message, "checkpoints/step-00000004.pt")


def test_a_training_resumes_from_a_path_in_another_folder(tiny: Run) -> None:
    first = tiny()[1]
    code, out, _ = tiny("--checkpoint-dir=other", "--resume=checkpoints/step-00000004.pt")
    assert code == 0
    assert_names(out[1].partition(";")[0], "checkpoints/step-00000004.pt", "5", "8", "2")
    assert (saved("other"), out[-1]) == (["step-00000008.pt"], first[-1])


@pytest.mark.parametrize(("name", "expected"), [("text", 65), ("none", 66)])
def test_a_path_that_is_not_there_or_no_checkpoint(tiny: Run, name: str, expected: int) -> None:
    Path("text").write_text("text")
    code, _, err = tiny(f"--resume={name}")
    assert (code, len(err)) == (expected, 1)
    assert_names(err[0], "--resume")


def test_a_scaled_learning_rate_is_printed(tiny: Run) -> None:
    assert_names(tiny("--scale-lr")[1][1], "0.05", "1", "--scale-lr")


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(["--no-deterministic"], id="algorithms"),
        pytest.param(["--precision=bf16"], id="precision"),
        pytest.param(["--no-channels-last"], id="memory-format"),
        pytest.param(["--bucket-mb=4"], id="buckets"),
    ],
)
def test_a_deterministic_training_goes_on_with_the_same_rounding(tiny: Run, changed: list[str]) -> None:
    tiny("--deterministic", "--epochs=1")
    code, _, err = tiny("--deterministic", *changed)
    assert (code, len(err)) == (78, 1)
    assert_names(err[0], "checkpoints/step-00000004.pt", "--checkpoint-dir", "--allow-changed-config")
    assert tiny("--deterministic", "--precision=fp32", "--input=loader", "--recompute", "--no-bucket-view")[0] == 0


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(["--batch-size=32", "--lr=0.5"], id="batch-size-and-lr"),
        pytest.param(["--no-augment"], id="augment"),
    ],
)
def test_another_training_is_refused_by_name_and_value(tiny, changed):
    test_checkpoint_manager.test_another_training_is_refused_by_name_and_value(tiny, changed)


@pytest.mark.parametrize(("compress", "code"), [("none", 0), ("bf16", 78)])
def test_a_checkpoint_with_the_old_name_of_the_communication_is_compared(tiny: Run, compress: str, code: int) -> None:
    tiny("--epochs=1")
    path = Path("checkpoints/step-00000004.pt")
    checkpoint = load_checkpoint(path)
    options = dict(checkpoint.shaping)
    del options["communication"]
    write_checkpoint(path, replace(checkpoint, shaping={**options, "compress": compress}))
    again, _, err = tiny()
    assert again == code
    assert_names("\n".join(err), *(["communication", "bf16", "plain"] if code else []))
