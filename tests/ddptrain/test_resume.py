"""Where a training starts, and what is refused. One process, a tiny training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddptrain.main import run
from ddptrain.options import parse
from ddpwire.signals import Signals

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")

Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Train 2 epochs of 4 steps in the test's folder; the exit code, and the lines of stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run_tiny(*arguments: str) -> tuple[int, list[str], list[str]]:
        code = run(parse([*TINY, "--epochs=2", *arguments], {}), {}, Signals())
        out, err = capfd.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run_tiny


def saved(folder: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step-*") if path.suffix != ".json")


def tear(name: str) -> None:
    path = Path("checkpoints", name)
    path.write_bytes(path.read_bytes()[:-100])


def test_a_run_that_is_done_is_only_evaluated_again(tiny: Run) -> None:
    code, first, _ = tiny()
    assert code == 0
    assert saved() == ["step-00000004.pt", "step-00000008.pt"]
    code, again, _ = tiny()
    assert (code, again[1]) == (
        0,
        "resumed from checkpoints/step-00000008.pt: all 8 steps are done, nothing is left to train "
        "(more --epochs go on, another --checkpoint-dir starts anew)",
    )
    assert again[-3:] == ["images/s       nothing was trained", *first[-2:]]
    assert again[-4] == first[-4]


def test_fewer_epochs_are_told(tiny: Run) -> None:
    tiny("--epochs=4", "--keep=0")
    for step in ("8", "12", "16"):
        Path(f"checkpoints/step-{step:0>8}.pt").unlink()
        Path(f"checkpoints/step-{step:0>8}.json").unlink()
    code, out, _ = tiny("--epochs=2")
    assert (code, out[1]) == (
        0,
        "resumed from checkpoints/step-00000004.pt: going on at step 5 of 8 (epoch 2); "
        "2 epochs now, 4 before: the learning rate follows the new length",
    )
    code, out, _ = tiny("--epochs=1")
    assert (code, out[1]) == (
        0,
        "resumed from checkpoints/step-00000008.pt: step 8 of only 4 is done, nothing is left to train "
        "(more --epochs go on, another --checkpoint-dir starts anew)",
    )


def test_no_epochs_evaluate_and_write_nothing(tiny: Run) -> None:
    told = (
        "ddptrain: --epochs 0 only evaluates, and checkpoints holds no checkpoint: "
        "give --resume FILE, another --checkpoint-dir, or --pretrained FILE"
    )
    code, out, err = tiny("--epochs=0")
    assert (code, err) == (66, [told])
    _, trained, _ = tiny()
    code, out, err = tiny("--epochs=0", "--resume=checkpoints/step-00000004.pt", "--checkpoint-dir=other")
    assert (code, err, saved("other")) == (0, [], [])
    assert out[1] == "resumed from checkpoints/step-00000004.pt: evaluating step 4 (--epochs 0)"
    code, out, _ = tiny("--epochs=0")
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert out[-3:] == ["images/s       nothing was trained", *trained[-2:]]
    assert out[-4] == trained[-4]


def test_more_epochs_go_on(tiny: Run) -> None:
    tiny()
    code, out, err = tiny("--epochs=3")
    assert (code, err) == (0, [])
    assert (
        out[1]
        == "resumed from checkpoints/step-00000008.pt: going on at step 9 of 12 (epoch 3); 3 epochs now, 2 before: "
        "the learning rate follows the new length"
    )
    assert out[2].startswith("epoch  3/3  loss ")


def test_in_the_middle_of_an_epoch_it_goes_on_with_the_rest(tiny: Run) -> None:
    code, undisturbed, _ = tiny("--checkpoint-every=3", "--keep=0")
    assert saved() == ["step-00000003.pt", "step-00000004.pt", "step-00000006.pt", "step-00000008.pt"]
    for name in ("step-00000004.pt", "step-00000006.pt", "step-00000008.pt"):
        Path("checkpoints", name).unlink()
    code, out, _ = tiny()
    assert (code, out[1]) == (0, "resumed from checkpoints/step-00000003.pt: going on at step 4 of 8 (epoch 1)")
    assert out[-1] == undisturbed[-1]


def test_a_torn_one_is_set_aside_by_name(tiny: Run) -> None:
    tiny()
    size = Path("checkpoints/step-00000008.pt").stat().st_size
    tear("step-00000008.pt")
    code, out, err = tiny()
    told = "resumed from checkpoints/step-00000004.pt: going on at step 5 of 8 (epoch 2)"
    assert (code, out[1].partition(";")[0]) == (0, told)
    assert err == [
        "ddptrain: warning: checkpoints/step-00000008.pt is set aside as step-00000008.pt.bad: "
        f"it has {size - 100:,} bytes, not {size:,}"
    ]
    assert saved() == ["step-00000004.pt", "step-00000008.json.bad", "step-00000008.pt", "step-00000008.pt.bad"]


def test_never_step_0_in_silence(tiny: Run) -> None:
    tiny()
    size = Path("checkpoints/step-00000008.pt").stat().st_size
    tear("step-00000008.pt")
    Path("checkpoints/step-00000004.pt").write_bytes(b"")
    Path("checkpoints/step-00000002.json").write_text("{}")
    told = [
        f"ddptrain: warning: checkpoints/step-00000008.pt cannot be used: it has {size - 100:,} bytes, not {size:,}",
        f"ddptrain: warning: checkpoints/step-00000004.pt cannot be used: it has 0 bytes, not {size:,}",
        "ddptrain: warning: checkpoints/step-00000002.pt cannot be used: its manifest step-00000002.json is torn",
        "ddptrain: none of the 3 checkpoints in checkpoints is whole: to start at step 0, delete them "
        "(also step-*.bad) or give another --checkpoint-dir",
    ]
    for _ in (1, 2):  # it is refused as often as it is tried
        code, out, err = tiny()
        assert (code, len(out), err) == (65, 1, told)


def test_nor_where_only_those_that_were_set_aside_are_left(tiny: Run) -> None:
    tiny("--epochs=1")
    for name in ("step-00000004.pt", "step-00000004.json"):
        Path("checkpoints", name).rename(Path("checkpoints", name + ".bad"))
    code, _, err = tiny()
    assert (code, err) == (
        65,
        [
            "ddptrain: none of the 1 checkpoints in checkpoints is whole: to start at step 0, delete them "
            "(also step-*.bad) or give another --checkpoint-dir"
        ],
    )


def test_no_code_in_a_checkpoint_is_run(tiny: Run) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (Path("attacked"),))

    Path("checkpoints").mkdir()
    torch.save({"format": 1, "model": Attack()}, "checkpoints/step-00000004.pt")
    assert tiny()[0] == 65
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--seed=1"], "seed 0, not 1"),
        (["--batch-size=32"], "batch-size 16, not 32"),
        (["--batch-size=32", "--lr=0.5"], "batch-size 16, not 32, lr 0.05, not 0.5"),
        (["--model=convnet"], "model simple, not convnet"),
        (["--no-augment"], "augment True, not False"),
    ],
)
def test_another_training_is_refused_by_name_and_value(tiny: Run, changed: list[str], told: str) -> None:
    tiny()
    code, _, err = tiny(*changed)
    assert code == 78
    assert err == [
        f"ddptrain: checkpoints/step-00000008.pt was trained with {told}: "
        "give the same options, another --checkpoint-dir, or --allow-changed-config"
    ]


def test_another_training_is_gone_on_with_when_asked_for(tiny: Run) -> None:
    tiny("--epochs=1")
    code, out, err = tiny("--label-smoothing=0.1", "--allow-changed-config")
    told = "resumed from checkpoints/step-00000004.pt: going on at step 5 of 8 (epoch 2)"
    assert (code, out[1].partition(";")[0]) == (0, told)
    assert err == [
        "ddptrain: warning: checkpoints/step-00000004.pt was trained with label-smoothing 0.0, not 0.1; "
        "going on (--allow-changed-config)"
    ]


def test_weights_that_do_not_fit_are_one_line(tiny: Run) -> None:
    tiny("--epochs=1")
    code, _, err = tiny("--synthetic-shape=1x12x12", "--allow-changed-config")
    assert (code, len(err)) == (78, 2)
    assert err[1].startswith("ddptrain: checkpoints/step-00000004.pt does not fit this training: Error(s) in loading ")


def test_never_overwrites_nothing(tiny: Run) -> None:
    assert tiny("--resume=never")[0] == 0
    before = [Path("checkpoints", name).read_bytes() for name in saved()]
    code, _, err = tiny("--resume=never")
    assert (code, err) == (
        78,
        [
            "ddptrain: --resume never, but checkpoints holds step-00000008.pt: "
            "give another --checkpoint-dir, or --resume auto"
        ],
    )
    assert [Path("checkpoints", name).read_bytes() for name in saved()] == before


def test_a_path_is_gone_on_from_in_another_folder(tiny: Run) -> None:
    first = tiny()[1]
    code, out, _ = tiny("--checkpoint-dir=other", "--resume=checkpoints/step-00000004.pt")
    told = "resumed from checkpoints/step-00000004.pt: going on at step 5 of 8 (epoch 2)"
    assert (code, out[1].partition(";")[0]) == (0, told)
    assert (saved("other"), out[-1]) == (["step-00000008.pt"], first[-1])


def test_a_path_that_is_not_there_or_no_checkpoint(tiny: Run) -> None:
    Path("text").write_text("text")
    assert tiny("--resume=text")[::2] == (65, ["ddptrain: --resume text: torn or not a checkpoint"])
    assert tiny("--resume=none")[::2] == (
        66,
        ["ddptrain: --resume none: No such file or directory; auto, never or a file are allowed"],
    )


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(tiny: Run, folder: str) -> None:
    Path("file").touch()
    code, out, err = tiny(f"--checkpoint-dir={folder}")
    assert (code, out) == (73, [])
    assert err == [
        f"ddptrain: --checkpoint-dir {folder} cannot be written: there is a file in its place; give another one"
    ]


def test_what_a_killed_run_left_half_written_is_swept_up(tiny: Run) -> None:
    Path("checkpoints").mkdir()
    Path("checkpoints/.step-00000003.pt.part").write_bytes(b"half")
    Path("checkpoints/.step-00000003.json.abc").write_bytes(b"{")
    tiny()
    assert [path.name for path in Path("checkpoints").glob(".step*")] == []
    assert saved() == ["step-00000004.pt", "step-00000008.pt"]


def test_scaled_learning_rate_is_said(tiny: Run) -> None:
    assert tiny("--scale-lr")[1][1] == "learning rate 0.05 x 1 rank = 0.05 (--scale-lr)"


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
    reason = "File too large"
    assert ended.code == 73
    assert [line.split()[0] for line in ended.out.splitlines()] == ["simple", "epoch", "epoch"]
    warning = "ddptrain: warning: no checkpoint of step {0}: checkpoints/step-{0:08d}.pt: " + reason
    assert ended.err.splitlines() == [
        warning.format(4),
        warning.format(8),
        warning.format(8),
        "ddptrain: step 8 could not be saved as checkpoints/step-00000008.pt; the one before it is whole",
    ]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]
