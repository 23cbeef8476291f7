"""Ways of communication through changes of the number of ranks, and the choice of auto through restarts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.messages import assert_names

from ddptrain.checkpoint import load_checkpoint
from ddpwire.events import read_events

DATA = ("--data=synthetic", "--synthetic-samples=96", "--synthetic-shape=1x16x16", "--batch-size=12", "--lr=0.02")
OPTIONS = (*DATA, "--model=convnet", "--checkpoint-every=3", "--keep=0")  # 8 steps an epoch
CHOOSING = """
import runpy, sys
from ddptrain import communication
from ddpwire.communication import parse_way

communication.choose = lambda *_, **__: {parse_way("diloco:4"): 0.1}
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


@pytest.mark.parametrize("way", ["powersgd:2", "localsgd:4", "diloco:4"])
def test_another_number_of_ranks_begins_with_the_mean_of_their_states(
    way: str, train: Callable[..., list], tmp_path: Path
) -> None:
    options = (*OPTIONS, f"--communication={way}")
    assert train(*options, "--epochs=1", size=3)[0].code == 0
    for path in (tmp_path / "checkpoints").glob("step-00000008.*"):
        path.unlink()
    for size, epochs in ((2, 2), (1, 3), (2, 4)):
        ended = train(*options, f"--epochs={epochs}", size=size)
        assert [rank.code for rank in ended] == [0] * size
        if size == 2:
            assert_names(ended[0].out.splitlines()[1], f"step-{6 if epochs == 2 else 24:08d}.pt")
        assert_names(ended[0].err, *(["3 ranks", "2 ranks"] if epochs == 2 else []))


def test_the_choice_of_auto_is_kept(train: Callable[..., list], tmp_path: Path) -> None:
    environ = {"DDP_EVENTS_FILE": str(tmp_path / "events.jsonl")}
    options = (*OPTIONS, "--communication=auto")
    for epochs in (2, 3):
        rank_0, _ = train(*options, f"--epochs={epochs}", size=2, command=("-c", CHOOSING), environ=environ)
        assert (rank_0.code, rank_0.err) == (0, "")
        newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
        assert load_checkpoint(newest).parts["communication"]["way"] == "diloco:4"
    events = read_events((tmp_path / "events.jsonl").read_text())
    assert [event.facts["way"] for event in events if event.event == "communication_chosen"] == ["diloco:4"]
