"""Run on each rank: train by each strategy, read each checkpoint by every other; rank 0 prints what it found as JSON.

``sharded.py train FOLDER STEPS OPTIONS``; ``sharded.py read FOLDER STEPS OPTIONS`` reads the checkpoint of ``fsdp``.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddptrain import compat
from ddptrain.callbacks import NonFiniteGuard
from ddptrain.checkpoint import map_tensors
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.checkpoint_manager import CheckpointManager
from ddptrain.config import Options, parse_options
from ddptrain.data.sampling import batches, epoch_order, shard_of
from ddptrain.data.text import load_text
from ddptrain.distributed import World, gather, join_ranks, make_world, read_rank_info, set_up_torch, sum_over_ranks
from ddptrain.goodput import Goodput
from ddptrain.metrics import Metrics
from ddptrain.step_timing import Phases
from ddptrain.train_loop import evaluate, train_step
from ddptrain.training_state import TrainingState, build_training_state
from ddpwire.events import EventLog

READERS = {"ddp": ("fsdp",), "fsdp": ("hybrid", "ddp"), "hybrid": ("fsdp",)}  # of the checkpoints of each strategy


def build(options: Options, world: World, strategy: str) -> TrainingState:
    options = replace(options, ranks=replace(options.ranks, strategy=strategy))
    data = load_text(options.data, 0)
    return build_training_state(options, world, data, batch_size=options.training.batch_size)


def train(state: TrainingState, num_steps: int) -> list[float]:
    """Take the steps; the loss of each, over all ranks."""
    rank_info, losses, step = state.world.rank_info, [], 0
    phases, guard = Phases(), NonFiniteGuard(state.world.device)
    while step < num_steps:
        epoch = step // state.steps_per_epoch
        order = epoch_order(len(state.data.train), seed=0, epoch=epoch)
        for batch in list(batches(order, state.batch_size, first=0))[: num_steps - step]:
            shard = shard_of(batch, rank=rank_info.rank, shares=(1,) * rank_info.size)
            loss = train_step(state, shard, step=step + 1, epoch=epoch, lr=state.lr(step), phases=phases, guard=guard)
            losses.append(float(sum_over_ranks(rank_info, loss.detach())) / rank_info.size)
            step += 1
    return losses


def sizes(state: TrainingState) -> dict[str, int]:
    """Bytes on this rank."""

    def own(tensors: list[torch.Tensor]) -> int:
        parts = [tensor.to_local() if isinstance(tensor, compat.sharded_type()) else tensor for tensor in tensors]
        return sum(part.numel() * part.element_size() for part in parts)

    parameters = list(state.model.parameters())
    moments = [value for values in state.optimizer.state.values() for value in values.values() if value.ndim]
    return {
        "parameters": own(parameters),
        "gradients": own([parameter.grad for parameter in parameters if parameter.grad is not None]),
        "optimizer": own(moments),
    }


def digest(state: TrainingState) -> str:
    """A hash of every tensor of a checkpoint, gathered from the ranks."""
    sha256 = hashlib.sha256()

    def add(path: tuple[Any, ...], tensor: torch.Tensor) -> None:
        whole = compat.whole_tensor(tensor.detach()).contiguous()
        sha256.update(f"{path} {whole.dtype} {tuple(whole.shape)}".encode() + whole.numpy().tobytes())

    map_tensors({name: part.state_dict() for name, part in state.parts.items()}, add)
    return sha256.hexdigest()


def with_manager(state: TrainingState, folder: Path, action: Callable[[CheckpointManager], Any]) -> Any:
    folder.mkdir(exist_ok=True)
    directory = CheckpointDirectory(folder) if state.world.rank_info.is_first else None
    state = replace(
        state, options=replace(state.options, checkpoints=replace(state.options.checkpoints, folder=folder))
    )
    manager = CheckpointManager(
        state, directory, Metrics(), Goodput(0.0), EventLog(None, node=0), on_wait=lambda _: None
    )
    result = action(manager)
    gather(state.world.rank_info, 0)
    if directory is not None:
        directory.unlock()
    return result


def read(options: Options, world: World, strategy: str, folder: Path, num_steps: int) -> str:
    state = build(options, world, strategy)
    assert with_manager(state, folder, lambda manager: manager.resume())[1] == num_steps
    return digest(state)


def main(verb: str, folder: Path, num_steps: int, arguments: list[str]) -> None:
    options = parse_options(arguments, os.environ)
    rank_info = read_rank_info(os.environ, options.ranks)
    set_up_torch(rank_info, os.environ, deterministic=False)
    join_ranks(rank_info, options.ranks)
    world = make_world(rank_info, "cpu", options.ranks)
    results: dict[str, Any] = {}
    if verb == "read":
        results = {"fsdp": read(options, world, "fsdp", folder / "fsdp", num_steps)}
    else:
        for strategy in READERS:
            state = build(options, world, strategy)
            losses = train(state, num_steps)
            with_manager(state, folder / strategy, lambda manager: manager.save_last(num_steps, 0.5))
            results[strategy] = {
                "losses": losses,
                "bytes": gather(rank_info, sizes(state)),
                "bits": evaluate(state).bits,
                "digest": digest(state),
            }
        for strategy in READERS:
            results[strategy]["read by"] = {
                reader: read(options, world, reader, folder / strategy, num_steps) for reader in READERS[strategy]
            }
    if rank_info.is_first:
        print(json.dumps(results), flush=True)
    gather(rank_info, 0)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
