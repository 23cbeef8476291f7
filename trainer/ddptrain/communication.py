"""``--communication``: how the ranks exchange gradients or weights between steps, and the state that this needs.

``powersgd`` is torch's hook. Each rank remembers the part of its gradient that was not sent (error feedback), and adds
it to its next gradient. With ``localsgd`` and ``diloco``, a rank takes its steps alone. After every H steps of an epoch
and at its end, the ranks average their weights and the statistics of batch norms. DiLoCo (arXiv 2311.08105) then takes
a step of an outer optimizer from the last common weights towards the average. Moments of the optimizer are not
exchanged.

Checkpoints contain the state of every rank where it differs, as the part ``ranks``. With another number of ranks, each
rank begins with the mean of these states. The mean keeps the sum of the error feedback.
"""

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddptrain import compat
from ddptrain.checkpoint import map_tensors, whole
from ddptrain.distributed import World, broadcast, gather, lay_out_buckets
from ddptrain.optimizer import match_strides
from ddptrain.step_timing import SKIPPED_STEPS, Phases
from ddpwire.communication import AUTO, PROBES, Link, Way, choose, fit_link, parse_way

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # as in arXiv 2311.08105
MEASURED_STEPS = 5  # for auto, after SKIPPED_STEPS
EPSILON = 1e-8  # against a division by 0 if a gradient is 0
_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
T = TypeVar("T")


class Communication:
    """The communication of one training on one rank, for every way except ``plain``."""

    def __init__(
        self, text: str, ddp: DistributedDataParallel, optimizer: Optimizer, world: World, *, steps_per_epoch: int
    ) -> None:
        self.is_auto = text == AUTO
        self.way: Way | None = None  # None: auto has not chosen yet, and the ranks exchange gradients as in plain DDP
        self._ddp: DistributedDataParallel | None = ddp  # until a way is chosen, as its buckets take memory
        self._optimizer, self._world = optimizer, world
        self._model: nn.Module = ddp.module
        self._steps_per_epoch = steps_per_epoch
        self._powersgd: PowerSGDState | None = None
        self._outer: Optimizer | None = None
        self._start: list[Tensor] = []  # the common weights after the last exchange
        self._num_measured, self._computed_s = 0, 0.0
        if not self.is_auto:
            self._use(parse_way(text))

    @property
    def is_local(self) -> bool:
        """Whether the ranks exchange weights instead of gradients."""
        return self.way is not None and self.way.is_local

    @property
    def has_state(self) -> bool:
        """Whether checkpoints contain a state of the communication. The answer never changes."""
        return self.is_auto or self.is_local or self._powersgd is not None

    def _use(self, way: Way) -> None:
        ddp, self._ddp, self.way = self._ddp, None, way
        if ddp is not None and way.kind in _HOOKS:
            ddp.register_comm_hook(self._world.data_group, _HOOKS[way.kind])
        elif ddp is not None and way.kind == "powersgd":
            ddp.register_comm_hook(None, self._exchange)
            lay_out_buckets(ddp)  # the error feedback belongs to buckets, so these must not change
            self._powersgd = PowerSGDState(
                self._world.data_group, way.number, start_powerSGD_iter=2, orthogonalization_epsilon=EPSILON
            )
            self._powersgd.iter = 2  # torch would wait for DDP to lay out its buckets
        elif way.kind == "diloco":
            self._start = [parameter.detach().clone() for parameter in self._parameters]
            self._outer = torch.optim.SGD(self._start, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _exchange(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        if self._powersgd is None:  # DDP lays out its buckets, and no value matters
            buffer: Tensor = bucket.buffer()
            future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
            future.set_result(buffer)
            return future
        error = self._powersgd.error_dict.get(bucket.index())
        if error is not None and error.shape != bucket.buffer().shape:  # after a resume with other buckets
            for memory in self._memory:
                memory.clear()
        sent = powerSGD_hook(self._powersgd, bucket)
        if self._world.backend != "nccl":  # gloo's threads would start the all-reduces of two buckets in any order
            sent.wait()
        return sent

    @property
    def _memory(self) -> list[dict[int, Tensor]]:
        state = self._powersgd
        return [] if state is None else [state.error_dict, state.p_memory_dict, state.q_memory_dict]

    def agree(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradient, or the mean of the ranks' norms. If one is not finite, the mean is not."""
        if self.is_local:
            norm = norm.detach() / self._world.rank_info.size
            dist.all_reduce(norm, group=self._world.data_group)
        return norm

    def _is_common(self, step: int) -> bool:
        """Return whether all ranks have the same weights after this step."""
        return self.way is None or not self.is_local or step % self._steps_per_epoch % self.way.number == 0

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Exchange the weights, if this is due after ``step`` steps. Every rank must call this."""
        if not self.is_local or not self._is_common(step):
            return
        weights: list[Tensor] = [*self._parameters]
        tensors = [*weights, *(buffer for buffer in self._model.buffers() if buffer.is_floating_point())]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / self._world.rank_info.size
        dist.all_reduce(flat, group=self._world.data_group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        compat.copy_all(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
        if self._outer is not None:
            for start, weight in zip(self._start, weights, strict=True):
                start.grad = start - weight
            self._outer.step()
            self._outer.zero_grad()
            compat.copy_all(weights, self._start)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
        outer = {} if self._outer is None else {"start": self._start, "outer": self._outer.state_dict()}
        return {"way": "" if self.way is None else str(self.way), **outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that all ranks share. The state of another way is ignored, and {} is none.

        The weights must be loaded before.
        """
        way = state.get("way", "")
        if self.is_auto and way:
            self._use(parse_way(way))
        if self._outer is None:
            return
        if way == str(self.way):
            self._outer.load_state_dict(state["outer"])
            match_strides(self._outer)
        source = state["start"] if way == str(self.way) else [*self._parameters]
        with torch.no_grad():
            for start, value in zip(self._start, source, strict=True):
                start.copy_(value)

    def gather(self, step: int) -> list[dict[str, Any]] | None:
        """Return on rank 0 the states of all ranks after this step, and None elsewhere. Every rank must call this."""
        own: dict[str, Any] = {}
        if self._powersgd is not None:
            own = {"memory": [{index: memory[index] for index in sorted(memory)} for memory in self._memory]}
        elif self.is_local:
            own = {"optimizer": self._optimizer.state_dict()["state"]}
            own |= {} if self._is_common(step) else {"model": self._model.state_dict()}
        own = map_tensors(own, lambda _, tensor: tensor.detach().cpu())
        states: list[Any] | None = [None] * self._world.rank_info.size if self._world.rank_info.is_first else None
        dist.gather_object(own, states, dst=0)
        return states

    def load_ranks(self, path: object, states: Sequence[Any] | None, log: Callable[[str], None]) -> None:
        """Load this rank's state. On rank 0, ``states`` is what `gather` has returned. Every rank must call this."""
        rank_info = self._world.rank_info
        if states and states[0] and len(states) != rank_info.size:
            now = f"each of the {rank_info.size} ranks now begins with the mean of their states"
            log(f"{path} is from {len(states)} ranks with different states (--communication): {now}")
            states = [mean_state(states)] * rank_info.size
        received: list[Any] = [{}]
        if broadcast(rank_info, bool(states and states[0])):
            dist.scatter_object_list(received, [*map(whole, states)] if states else None, src=0)
        (own,) = received
        for memory, values in zip(self._memory, own.get("memory", ()), strict=False):
            memory.update({index: value.to(self._world.device) for index, value in values.items()})
        if self.is_local and "optimizer" in own:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": own["optimizer"]})
            match_strides(self._optimizer)
            if "model" in own:
                self._model.load_state_dict(own["model"])

    def measure(self, phases: Phases) -> dict[str, Any] | None:
        """Call this after every step. Once auto has chosen a way, return the keys of the event for it, once."""
        if self.way is not None:
            return None
        self._num_measured += 1
        if self._num_measured not in (SKIPPED_STEPS, SKIPPED_STEPS + MEASURED_STEPS):
            return None
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        phases.begin()  # reads the events that the GPU has passed
        total_s = sum(seconds for phase, seconds in phases.totals.items() if phase not in ("comm_exposed", "other"))
        before_s, self._computed_s = self._computed_s, total_s
        if self._num_measured == SKIPPED_STEPS:
            return None
        rank_info = self._world.rank_info
        compute_s = max(gather(rank_info, (total_s - before_s) / MEASURED_STEPS))
        link = broadcast(rank_info, self._measure_link())
        shapes, device = [parameter.shape for parameter in self._parameters], self._world.device.type
        seconds = choose(shapes, link, compute_s=compute_s, device=device)
        self._use(next(iter(seconds)))
        expected_s = {str(way): round(way_s, 4) for way, way_s in seconds.items()}
        speed = {"latency_s": round(link.latency_s, 6), "bytes_per_s": round(link.bytes_per_s)}
        return {"way": str(self.way), "expected_s": expected_s, "compute_s": round(compute_s, 4), **speed}

    def _measure_link(self) -> Link:
        mean_s = {}
        for size, count in PROBES.items():
            data = torch.zeros(size // 4, device=self._world.device)
            times_s = []
            for _ in range(count + 1):
                dist.all_reduce(data, group=self._world.data_group)
                if data.is_cuda:
                    torch.cuda.synchronize()
                times_s.append(time.perf_counter())
            mean_s[size] = (times_s[-1] - times_s[0]) / count  # without the first call, which allocates memory
        return fit_link(self._world.rank_info.size, mean_s)


def mean_state(states: Sequence[T]) -> T:
    """Return a state with the mean of each tensor of floating-point numbers. Other values are those of the first."""

    def mean(path: tuple[Any, ...], first: Tensor) -> Tensor:
        if not first.is_floating_point():
            return first
        return torch.stack([functools.reduce(operator.getitem, path, cast(Any, state)) for state in states]).mean(0)

    result: T = map_tensors(states[0], mean)
    return result
