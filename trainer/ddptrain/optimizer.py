"""The optimizers, the learning rate as a function of the step, and the moving average of the weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddptrain import compat
from ddptrain.cifarnet import Conv
from ddptrain.config import OptimizerOptions
from ddptrain.errors import config_error

WARM_UP_SHARE = 0.3  # share of the steps
START_SHARE = 1 / 25  # of the peak; both as in torch's OneCycleLR and L. N. Smith, N. Topin 2017, arXiv 1708.07120
MUON_MOMENTUM = 0.6  # as in https://github.com/KellerJordan/cifar10-airbench
SCALED_WARM_UP_EPOCHS = 5.0  # with --scale-lr: P. Goyal et al. 2017, https://arxiv.org/abs/1706.02677


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return the optimizer. Norms and biases get no weight decay, because it would not regularise them.

    ``lr_scale`` of a group is the factor of its learning rate. Raises TrainError.
    """
    hidden = [module.weight for module in model.modules() if isinstance(module, Conv) and options.name == "muon"]
    known = {id(weight) for weight in hidden}
    parameters = [item for item in model.parameters() if item.requires_grad and id(item) not in known]
    groups: list[dict[str, Any]] = [
        {"params": [item for item in parameters if item.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [item for item in parameters if item.ndim < 2], "weight_decay": 0.0},
    ]
    if options.bias_lr:
        groups[1] |= {"weight_decay": options.weight_decay / options.bias_lr, "lr_scale": options.bias_lr}
    groups = [group for group in groups if group["params"]]
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=(options.momentum, 0.999), fused=True)
    kind = {"foreach" if isinstance(parameters[0], compat.sharded_type()) else "fused": True}
    sgd = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, nesterov=options.momentum > 0, **kind)
    if options.momentum:
        # torch makes the buffers at the first step, which fp16 may skip. Buffers of 0 give the same first step.
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    if options.name == "sgd":
        return sgd
    if not hidden:
        raise config_error("--optimizer muon is for cifarnet and cifarnet-deep", hint="give sgd or adamw")
    for group in sgd.param_groups:
        group["lr_scale"] = options.sgd_lr * group.get("lr_scale", 1.0)
    return Muon(torch.optim.Muon(hidden, lr=options.lr, weight_decay=0.0, momentum=MUON_MOMENTUM, ns_steps=3), sgd)


class Muon(torch.optim.Optimizer):
    """torch's Muon for hidden weights, and SGD for all other parameters, as one optimizer.

    Before a step, each matrix of Muon gets the norm of a matrix with orthonormal rows. Like torch's fused optimizers,
    it changes nothing if ``found_inf`` is set and not 0.
    """

    _step_supports_amp_scaling = True  # so GradScaler and NonFiniteGuard set found_inf

    def __init__(self, muon: torch.optim.Muon, sgd: torch.optim.SGD) -> None:
        super().__init__([*muon.param_groups, *sgd.param_groups], {})
        self._muon, self._sgd = muon, sgd
        self._weights: list[Tensor] = muon.param_groups[0]["params"]
        for weight in self._weights:
            muon.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        self.state.update({**muon.state, **sgd.state})
        self._share()

    def _share(self) -> None:
        self._muon.param_groups, self._sgd.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._sgd.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        found_inf: Any = getattr(self, "found_inf", None)
        tensors = [*self._weights, *(self.state[weight]["momentum_buffer"] for weight in self._weights)]
        before = [] if found_inf is None else [tensor.clone() for tensor in tensors]
        for weight in self._weights:
            weight.mul_(len(weight) ** 0.5 / weight.norm())
        self._muon.step(closure)  # type: ignore[no-untyped-call]
        is_skipped: Any = None if found_inf is None else found_inf > 0
        for tensor, copy in zip(tensors, before, strict=False):
            tensor.copy_(torch.where(is_skipped, copy, tensor))
        self._sgd.found_inf = found_inf  # type: ignore[attr-defined]
        self._sgd.step()


def learning_rate(options: OptimizerOptions, *, ranks: int, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of step ``step`` (counted from 0) of ``num_steps``."""
    peak = options.lr * (ranks if options.scale_lr else 1)
    if options.schedule == "one-cycle":
        return peak * one_cycle(step / num_steps)
    warm_up_epochs = options.warmup
    if warm_up_epochs is None:
        warm_up_epochs = min(SCALED_WARM_UP_EPOCHS, num_steps / steps_per_epoch / 4) if options.scale_lr else 0.0
    warm_up = min(num_steps - 1, round(warm_up_epochs * steps_per_epoch))
    if step < warm_up:
        start = options.lr if options.scale_lr else 0.0
        return start + (peak - start) * (step + 1) / (warm_up + 1)
    if options.schedule in ("cosine", "linear"):
        fraction = (step - warm_up) / (num_steps - warm_up)
        return peak * (cosine(fraction) if options.schedule == "cosine" else 1 - fraction)
    if options.schedule == "steps":
        epoch = step // steps_per_epoch
        return float(peak * options.gamma ** sum(epoch >= milestone for milestone in options.milestones))
    return peak


def one_cycle(fraction: float) -> float:
    """Return the learning rate of one-cycle as a share of its peak. It rises to 1 and then falls to 0."""
    if fraction < WARM_UP_SHARE:
        return 1 + (START_SHARE - 1) * cosine(fraction / WARM_UP_SHARE)
    return cosine((fraction - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))


def cosine(fraction: float) -> float:
    """Return the learning rate as a share of its peak. It falls from 1 to 0 along a cosine."""
    return (1 + math.cos(math.pi * fraction)) / 2


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give each moment of the optimizer the strides of its weight, because a fused optimizer ignores strides.

    The strides differ if the checkpoint was saved with another setting of ``--channels-last``.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                state[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


class WeightAverage:
    """An exponential moving average of the weights, which is evaluated in place of the weights.

    ``average`` is a copy of the model. ``decay`` is the share of the average that each step keeps. In the first steps,
    the share is smaller.
    """

    def __init__(self, model: nn.Module, average: nn.Module, decay: float) -> None:
        self.model = average
        self._decay = decay
        self._weights = _float_tensors(model)
        self._averages = _float_tensors(average)
        buffers = zip(average.buffers(), model.buffers(), strict=True)
        self._counts = [(own, given) for own, given in buffers if not own.is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After ``step`` steps, add the weights and the statistics of the batch norms to the average."""
        decay = min(self._decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(self._averages, self._weights, step)  # type: ignore[no-untyped-call]
        for own, given in self._counts:
            own.copy_(given)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the average."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state of the average."""
        self.model.load_state_dict(state_dict)


def _float_tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
