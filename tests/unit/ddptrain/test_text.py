"""A text as data: which bytes are seen, what is refused; and the transformer that learns them."""

from pathlib import Path

import torch

from ddptrain.config import parse_options
from ddptrain.data.text import TextBatches, load_text
from ddptrain.distributed import RankInfo, World

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
