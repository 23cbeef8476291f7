"""Sharding with torch's fully_shard: each rank has some rows of every parameter, gradient and moment.

``fsdp`` shards over all ranks. ``hybrid`` shards over the ranks of each node, so each node has a complete replica. The
ranks of the first replica write the checkpoints. The import of this module takes 1 s.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ddptrain.checkpoint import Rows, Shard, map_tensors, whole
from ddptrain.config import RankOptions
from ddptrain.distributed import World, broadcast_state, gather
from ddptrain.errors import config_error
from ddptrain.models import blocks_of


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The sharding of a training. ``shard`` is the part of a checkpoint that this rank writes, or None."""

    world: World
    mesh: DeviceMesh
    shard: Shard | None

    def apply(self, model: nn.Module, weights: nn.Module | None, compute: torch.dtype | None) -> None:
        """Shard a model that is on the meta device, and load its weights. Every rank must call this.

        On rank 0, ``weights`` is the complete model, on the CPU. On the other ranks, it is None. ``compute`` is the
        dtype in which weights are gathered for mixed precision. If ``compute`` is None, they keep their own dtype.
        """
        reduce_dtype = None if compute is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
        # torch's batch normalization needs weights of the dtype of its statistics, which are not sharded.
        norms: list[nn.Module] = (
            [module for module in model.modules() if isinstance(module, _BatchNorm)] if compute else []
        )
        for module in norms:
            fully_shard(module, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        for module in (*(block for block in blocks_of(model) if block not in norms), model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)
        model.to_empty(device=self.world.device)
        device, values = self.world.device, None if weights is None else weights.state_dict()
        for name, own in model.state_dict().items():  # one at a time, to save memory
            value = torch.empty(own.shape, dtype=own.dtype, device=device) if values is None else values[name]
            if isinstance(own, DTensor):
                own.copy_(distribute_tensor(value.to(device), own.device_mesh, own.placements))
            else:
                own.copy_(broadcast_state(self.world.rank_info, value))

    def own_rows(self, state: Any) -> Any:
        """Return a copy of ``state`` for a checkpoint's shard, with only this rank's rows of each sharded tensor."""

        def rows_of(_path: tuple[Any, ...], tensor: Tensor) -> Any:
            return {"rows": tensor.to_local(), "shape": list(tensor.shape)} if isinstance(tensor, DTensor) else tensor

        return map_tensors(state, rows_of)

    def read_rows(self, part: Any, values: Any) -> Any:
        """Return the state ``values`` of ``part``, with only this rank's rows of each sharded tensor.

        ``values`` is mapped from the files of a checkpoint. Of these files, a rank reads only its rows.
        """
        likes: dict[tuple[Any, ...], Any]  # parameters and buffers, keyed by the beginning of their path in the state
        if isinstance(part, torch.optim.Optimizer):
            parameters = (parameter for group in part.param_groups for parameter in group["params"])
            likes = {("state", number): parameter for number, parameter in enumerate(parameters)}
        else:
            likes = {(name,): tensor for name, tensor in part.state_dict().items()}

        def read(path: tuple[Any, ...], leaf: Any) -> Tensor:
            like = likes.get(path[:2])
            if not isinstance(like, DTensor) or like.shape != leaf.shape:
                return cast(Tensor, whole(leaf).to(self.world.device, copy=True))
            local = torch.empty_like(like.to_local())
            first = -(-len(like) // self.mesh.size(-1)) * self.mesh.get_local_rank("shard")  # as in Tensor.chunk
            if isinstance(leaf, Rows):
                leaf.copy_to(local, first)
            else:
                local.copy_(leaf[first : first + len(local)])
            return DTensor.from_local(
                local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False
            )

        return map_tensors(values, read)


def make_sharding(options: RankOptions, world: World) -> Sharding:
    """Return the sharding for ``--strategy``. Every rank must call this. Raises TrainError."""
    rank_info, kind = world.rank_info, world.device.type
    timeout = timedelta(seconds=options.timeout_s)
    if options.strategy == "fsdp":
        mesh = DeviceMesh.from_group(world.data_group, kind, mesh_dim_names=("shard",))  # type: ignore[arg-type]
        num_shards = rank_info.size
    else:
        num_shards = rank_info.local_world_size
        places = gather(rank_info, (rank_info.local_rank, rank_info.local_world_size))
        if places != [(rank % num_shards, num_shards) for rank in range(rank_info.size)]:
            raise config_error(
                "--strategy hybrid needs the same number of ranks on every node, numbered node by node",
                hint="give fsdp",
            )
        grid = torch.arange(rank_info.size).view(-1, num_shards)
        groups: Any = [
            dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout, backend=world.backend)[0]
            for ranks in (grid.T, grid)
        ]
        mesh = DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=("replicate", "shard"))
    # The threads that write have their own group, because the training loop uses the default group at the same time.
    writers: Any = dist.new_group(list(range(num_shards)), timeout=timeout, backend="gloo")

    def gather_to_first(value: Any) -> list[Any] | None:
        values = [None] * num_shards if rank_info.is_first else None
        dist.gather_object(value, values, dst=0, group=writers)
        return values

    is_writer = rank_info.rank < num_shards
    shard = Shard(number=rank_info.rank, gather=gather_to_first) if is_writer else None
    return Sharding(world=world, mesh=mesh, shard=shard)
