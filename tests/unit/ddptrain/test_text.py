"""A text as data: which bytes are seen, what is refused; and the transformer that learns them."""

import re
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names

from ddptrain.config import parse_options
from ddptrain.data.text import TextBatches, load_text
from ddptrain.distributed import RankInfo, World
from ddptrain.errors import TrainError
from ddptrain.main import run
from ddptrain.memory_estimate import LIBRARY_BYTES
from ddptrain.training_state import build_training_state
from ddpwire.signals import Signals

CPU = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)


def text(folder: Path, size: int = 1000) -> Path:
    path = folder / "some.txt"
    path.write_bytes(bytes(number % 251 for number in range(size)))
    return path


def test_each_byte_at_the_end_is_predicted_once_and_no_window_is_trained_on_twice(tmp_path: Path) -> None:
    path = text(tmp_path)
    options = parse_options(["--data=text", f"--data-dir={path}", "--context=16", "--no-augment"], {})
    data = load_text(options.data, 0)
    tested = data.test.batch(torch.arange(len(data.test))).labels_B.flatten()
    assert bytes(tested.tolist()) == path.read_bytes()[-len(tested) :]
    assert len(tested) == 96
    trained = TextBatches(options, data, CPU.device).batch(torch.arange(len(data.train)), epoch=0)
    assert torch.equal(trained.inputs[:, 1:], trained.labels_B[:, :-1])
    assert bytes(trained.inputs.flatten().tolist()) == path.read_bytes()[: trained.inputs.numel()]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("--mixup=0.2", 78),
        ("--input=loader", 78),
        ("--model=convnet", 78),
        ("--heads=3", 78),
        ("--context=500", 65),
        ("--data-dir=missing.txt", 66),
    ],
)
def test_what_a_text_does_not_go_with_is_refused(given: str, code: int, tmp_path: Path) -> None:
    options = parse_options(["--data=text", f"--data-dir={text(tmp_path)}", "--context=16", given], {})
    with pytest.raises(TrainError) as refused:
        build_training_state(options, CPU, load_text(options.data, 0), batch_size=8)
    assert refused.value.code == code
    assert_names(refused.value, given.partition("=")[0])


def test_it_learns_a_text_that_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A stand-in for the memory of a GPU. The training runs on the CPU.
    monkeypatch.setattr("ddptrain.memory_estimate.gpu_memory", lambda _: LIBRARY_BYTES + 256 * 1024)
    (tmp_path / "ab.txt").write_text("ab" * 1000)
    shape = ("--layers=1", "--width=16", "--heads=2", "--context=16", "--batch-size=8", "--lr=0.01", "--epochs=6")
    assert run(parse_options(["--data=text", "--data-dir=ab.txt", *shape], {}), {}, Signals()) == 0
    out, err = capfd.readouterr()
    assert_names(err.splitlines()[0].replace("fp32", "amp"), "11,760", "16", "2.0")
    assert float(re.findall(r"^bits a byte    ([\d.]+)$", out, re.M)[0]) < 0.5
    assert re.search(r"^test accuracy  100.00 % \((\d+) of \1 bytes\)$", out, re.M)
