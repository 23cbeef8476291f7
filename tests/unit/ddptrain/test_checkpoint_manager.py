"""Where a training starts, and what is refused. One process, a tiny training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names

from ddprank.heartbeat import read_beat
from ddprank.signals import Signals
from ddptrain import main
from ddptrain.config import parse_options
from ddptrain.main import run
from ddpwire.events import Event, read_events

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")
Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Train 2 epochs of 4 steps in the test's folder; the exit code, and the lines of stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_EVENTS_FILE", "events.jsonl")

    def run_tiny(*arguments: str, **environ: str) -> tuple[int, list[str], list[str]]:
        Path("events.jsonl").unlink(missing_ok=True)
        environ = {"DDP_EVENTS_FILE": "events.jsonl", "DDP_HEARTBEAT_FILE": "heartbeat"} | environ
        code = run(parse_options([*TINY, "--epochs=2", *arguments], {}), environ, Signals())
        out, err = capfd.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run_tiny


def saved(folder: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step-*") if path.suffix != ".json")


def events() -> list[Event]:
    """The events of the last training."""
    return list(read_events(Path("events.jsonl").read_text()))


def tear(name: str) -> None:
    path = Path("checkpoints", name)
    path.write_bytes(path.read_bytes()[:-100])


def test_a_run_that_is_done_is_only_evaluated_again(tiny: Run) -> None:
    code, first, _ = tiny(DDP_STEPS_BEFORE="3")
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert sorted((event.event, event.step or 0) for event in events()) == [
        ("checkpoint_saved", 4),
        ("checkpoint_saved", 8),
        ("epoch_ended", 4),
        ("epoch_ended", 8),
        ("started_over", 0),
        ("training_began", 0),
        ("training_ended", 8),
    ]
    lost_s = events()[-1].facts["lost_s"]
    assert {"startup", "recompute", "evaluation", "checkpoint"} <= {cause for cause, lost in lost_s.items() if lost}
    Path("heartbeat").unlink()
    code, again, _ = tiny()
    assert (code, saved()) == (0, ["step-00000004.pt", "step-00000008.pt"])
    assert [event.event for event in events()] == ["checkpoint_loaded", "training_began", "training_ended"]
    assert read_beat(Path("heartbeat")).is_complete
    assert_names(again[1], "checkpoints/step-00000008.pt", "--epochs", "--checkpoint-dir")
    assert_names(again[-3], "images/s")
    assert again[-2:] == first[-2:]
    assert again[-4] == first[-4]


def test_more_epochs_go_on(tiny: Run) -> None:
    tiny()
    code, out, err = tiny("--epochs=3")
    assert (code, err) == (0, [])
    assert_names(out[1], "checkpoints/step-00000008.pt", "9", "12", "3", "learning-rate")
    assert out[2].startswith("epoch  3/3  loss ")


def test_in_the_middle_of_an_epoch_it_goes_on_with_the_rest(tiny: Run) -> None:
    code, undisturbed, _ = tiny("--checkpoint-every=3", "--keep=0")
    assert saved() == ["step-00000003.pt", "step-00000004.pt", "step-00000006.pt", "step-00000008.pt"]
    for name in ("step-00000004.pt", "step-00000006.pt", "step-00000008.pt"):
        Path("checkpoints", name).unlink()
    code, out, _ = tiny()
    assert code == 0
    assert_names(out[1], "checkpoints/step-00000003.pt", "4", "8", "1")
    assert out[-1] == undisturbed[-1]


def test_a_torn_one_is_set_aside_by_name(tiny: Run) -> None:
    tiny()
    size = Path("checkpoints/step-00000008.pt").stat().st_size
    tear("step-00000008.pt")
    code, out, err = tiny()
    assert (code, len(err)) == (0, 1)
    assert_names(out[1].partition(";")[0], "checkpoints/step-00000004.pt", "5", "8", "2")
    assert_names(err[0], "checkpoints/step-00000008.pt", "step-00000008.pt.bad", f"{size - 100:,}", f"{size:,}")
    assert saved() == ["step-00000004.pt", "step-00000008.json.bad", "step-00000008.pt", "step-00000008.pt.bad"]


def test_step_0_is_never_a_fallback(tiny: Run) -> None:
    tiny()
    size = Path("checkpoints/step-00000008.pt").stat().st_size
    tear("step-00000008.pt")
    Path("checkpoints/step-00000004.pt").write_bytes(b"")
    Path("checkpoints/step-00000002.json").write_text("{}")
    for _ in (1, 2):  # it is refused as often as it is tried
        code, out, err = tiny()
        assert (code, len(out), len(err)) == (65, 1, 4)
        assert_names(
            "\n".join(err),
            "checkpoints/step-00000008.pt",
            f"{size - 100:,}",
            f"{size:,}",
            "checkpoints/step-00000004.pt",
            "checkpoints/step-00000002.pt",
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
    "changed",
    [
        pytest.param(["--seed=1"], id="seed"),
        pytest.param(["--batch-size=32"], id="batch-size"),
        pytest.param(["--model=convnet"], id="model"),
    ],
)
def test_another_training_is_refused_by_name_and_value(tiny: Run, changed: list[str]) -> None:
    tiny()
    code, _, err = tiny(*changed)
    assert (code, len(err)) == (78, 1)
    assert_names(err[0], "checkpoints/step-00000008.pt", "--checkpoint-dir", "--allow-changed-config")


def test_another_training_continues_when_allowed(tiny: Run) -> None:
    tiny("--epochs=1")
    code, out, err = tiny("--label-smoothing=0.1", "--allow-changed-config")
    assert (code, len(err)) == (0, 1)
    assert_names(out[1].partition(";")[0], "checkpoints/step-00000004.pt", "5", "8", "2")
    assert_names(err[0], "checkpoints/step-00000004.pt", "label-smoothing", "0.0", "0.1", "--allow-changed-config")


def test_resume_never_overwrites_nothing(tiny: Run) -> None:
    assert tiny("--resume=never")[0] == 0
    before = [Path("checkpoints", name).read_bytes() for name in saved()]
    code, _, err = tiny("--resume=never")
    assert (code, len(err)) == (78, 1)
    assert_names(err[0], "--resume", "checkpoints", "step-00000008.pt", "--checkpoint-dir")
    assert [Path("checkpoints", name).read_bytes() for name in saved()] == before


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(tiny: Run, folder: str) -> None:
    Path("file").touch()
    code, out, err = tiny(f"--checkpoint-dir={folder}")
    assert (code, out, len(err)) == (73, [], 1)
    assert_names(err[0], "--checkpoint-dir")


def test_a_step_that_is_not_finite_ends_a_training_and_is_no_checkpoint(tiny: Run) -> None:
    code, _, err = tiny("--lr=1e30", "--schedule=constant", "--checkpoint-every=1")
    assert (code, len(err)) == (65, 1)
    facts = [(event.step, event.facts) for event in events() if event.event == "not_finite"]
    assert facts == [(2, {"what": "loss"})]
    assert_names(err[0], "2", "8", "rank 0", "--lr")
    assert (saved(), read_beat(Path("heartbeat")).is_complete) == (["step-00000001.pt"], False)


def test_evaluation_needs_a_checkpoint_and_a_heartbeat_needs_no_file(tiny: Run) -> None:
    assert tiny("--epochs=0")[0] == 66
    code, _, err = tiny(DDP_HEARTBEAT_FILE="nowhere/heartbeat")
    assert (code, len(err)) == (0, 1)


def test_debugging_and_the_estimate_of_memory_begin_with_the_training(
    tiny: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[str]()
    monkeypatch.setattr(main, "_turn_on_debugging", lambda: called.append("debug"))
    monkeypatch.setattr(main, "warn_if_too_large", lambda *_: called.append("memory"))
    tiny("--debug")
    tiny()
    assert called == ["debug", "memory", "memory"]


def test_what_a_killed_run_left_half_written_is_swept_up(tiny: Run) -> None:
    Path("checkpoints").mkdir()
    Path("checkpoints/.step-00000003.pt.part").write_bytes(b"half")
    Path("checkpoints/.step-00000003.json.abc").write_bytes(b"{")
    tiny()
    assert [path.name for path in Path("checkpoints").glob(".step*")] == []
    assert saved() == ["step-00000004.pt", "step-00000008.pt"]
