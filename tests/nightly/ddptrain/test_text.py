"""The windows of a text, the mask of the transformer, and the memory that a training of it takes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names
from tests.unit.ddptrain.test_datasets import CPU, text

from ddprank.signals import Signals
from ddptrain.config import ModelOptions, parse_options
from ddptrain.data.text import TextBatches, load_text
from ddptrain.distributed import RankInfo, World
from ddptrain.errors import TrainError
from ddptrain.gpt import generate
from ddptrain.main import run
from ddptrain.memory_estimate import LIBRARY_BYTES, warn_if_too_large
from ddptrain.memory_estimate import main as fit
from ddptrain.models import build_gpt
from ddptrain.training_state import build_training_state


def test_windows_begin_elsewhere_in_each_epoch_whatever_the_batch(tmp_path: Path) -> None:
    options = parse_options(["--data=text", f"--data-dir={text(tmp_path)}", "--context=16"], {})
    batches = TextBatches(options, load_text(options.data, 0), CPU.device)
    samples = torch.arange(len(load_text(options.data, 0).train))
    whole = batches.batch(samples, epoch=1).inputs
    assert torch.equal(torch.cat([batches.batch(part, epoch=1).inputs for part in samples.split(7)]), whole)
    assert not torch.equal(batches.batch(samples, epoch=2).inputs, whole)


def test_a_position_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = build_gpt(ModelOptions(name="gpt", layers=2, width=16, heads=2), context=8)
    tokens = torch.randint(256, (1, 8))
    later = tokens.clone()
    later[0, 5] += 1
    same = torch.isclose(model(tokens), model(later)).all(2)[0]
    assert same.tolist() == [True] * 5 + [False] * 3
    drawn = [
        [next(text) for _ in range(12)]
        for text in (generate(model, b"a", temperature=t, seed=1) for t in (0, 1e-320, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_training_that_does_not_fit_is_warned_of_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = LIBRARY_BYTES + (3 << 20)  # a stand-in for a GPU's
    monkeypatch.setattr("ddptrain.memory_estimate.gpu_memory", lambda _: memory)
    shape = ("--data=text", "--layers=8", "--width=64", "--heads=2", "--context=16", "--precision=fp32")
    options = parse_options([*shape, "--optimizer=adamw"], {})
    for rank, strategy, local_size, warned in ((0, "ddp", 4, True), (1, "ddp", 4, False), (0, "fsdp", 2, False)):
        rank_info = RankInfo(rank=rank, size=4, local_rank=0, local_world_size=local_size)
        world = World(rank_info=rank_info, device=CPU.device, backend="gloo", data_group=None)
        warn_if_too_large(replace(options, ranks=replace(options.ranks, strategy=strategy)), world, None, 4)
        err = capsys.readouterr().err
        assert bool(err) == warned
        if warned:
            assert_names(err[err.index("it does not fit with ddp") :], "4", "--gpus", "--strategy", "--batch-size")


def test_what_fit_recommends_is_a_training_that_ddptrain_takes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model=gpt", "--layers=24", "--width=2048", "--heads=16", "--optimizer=adamw", "--batch-size=8"]
    assert fit([*shape, "--memory=8GB"]) == 78
    command = re.findall(r"^  ddpctl launch --gpus (\d+) -- (.*)$", capsys.readouterr().out, re.M)
    ranks, arguments = int(command[0][0]), command[0][1].split()
    options = parse_options(arguments, {})
    assert (options.ranks.strategy, options.model.layers, options.training.batch_size) == ("fsdp", 24, 8 * ranks)
    recompute = ["--recompute"] if options.model.recompute else []
    assert fit([*shape, "--memory=8GB", "--strategy=fsdp", f"--ranks={ranks}", *recompute]) == 0
    assert fit([*shape, "--memory=8GB", "--strategy=fsdp", f"--ranks={max(2, ranks // 2)}", *recompute]) == 78


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
