"""Runs a script that asks for GPUs on CPUs (``ddpctl rehearse``).

torch's functions get a CPU where the script names a CUDA device, and gloo where it names NCCL.
"""

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from ddprun.system import compat


class Work(nullcontext["Work"]):
    """A CUDA stream or event of a CPU, whose work is done when a call returns."""

    cuda_stream, time = 0, 0.0

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(self)

    def record(self, *_: object) -> None:  # noqa: D102 (these are CUDA's methods)
        self.time = time.perf_counter()

    def record_event(self, event: "Work | None" = None) -> "Work":  # noqa: D102
        event = event or Work()
        event.record()
        return event

    def elapsed_time(self, end: "Work") -> float:  # noqa: D102
        return 1000 * (end.time - self.time)

    def query(self) -> bool:  # noqa: D102
        return True

    def is_capturing(self) -> bool:  # noqa: D102
        return False

    def wait(self, *_: object) -> None:  # noqa: D102
        pass

    synchronize = wait_event = wait_stream = wait


# What functions of torch.cuda and torch.accelerator return; those that return nothing have no effect.
CUDA: Mapping[str, Any] = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
    **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),  # of the first GPUs that have all number types that CPUs have
    "current_stream": Work(),
    "default_stream": Work(),
    "stream": Work(),
    "is_available": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
}


def install(num_devices: int) -> None:
    """Replace the functions of torch in this process that need a GPU."""
    load: Callable[[str], Any] = importlib.import_module
    torch, dist = load("torch"), load("torch.distributed")
    accelerator = {"is_available": True, "device_count": num_devices, "current_accelerator": torch.device("cuda")}
    accelerator |= {"set_device_index": None, "current_device_index": 0, "synchronize": None}
    accelerator |= {"current_stream": Work()}
    for module, values in ((torch.cuda, {**CUDA, "device_count": num_devices}), (torch.accelerator, accelerator)):
        for name, value in values.items():
            setattr(module, name, lambda *_, value=value, **__: value)
    torch.cuda.Stream = torch.cuda.Event = Work
    torch.Tensor.record_stream = Work.wait  # its parser takes no other stream, before it asks the mode
    _mode(torch).__enter__()  # for the rest of the process
    pinning, mesh = load("torch.utils.data._utils.pin_memory"), load("torch.distributed.device_mesh")
    pinning.pin_memory = lambda data, *_: data
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # it asks for the GPU's properties
    for owner, function, changed in (
        (dist, "init_process_group", {"backend": "gloo", "device_id": None}),
        (dist.distributed_c10d, "init_process_group", {"backend": "gloo", "device_id": None}),
        (dist, "barrier", {"device_ids": None}),
        (dist, "init_device_mesh", {"device_type": "cpu"}),
        (mesh, "init_device_mesh", {"device_type": "cpu"}),
        (torch, "load", {"map_location": "cpu"}),
        (torch.nn.parallel.DistributedDataParallel, "__init__", {"device_ids": None, "output_device": None}),
    ):
        compat.wrap(owner, function, functools.partial(_with_arguments, changed))


def _mode(torch: Any) -> Any:
    """Return a mode in which functions of tensors get a CPU in place of a GPU."""

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
            return torch.device("cpu")
        return value

    class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if func is torch.device:
                return func(*args, **(kwargs or {}))
            kwargs = {name: to_cpu(value) for name, value in (kwargs or {}).items()}
            if type(kwargs.get("device")) is int:  # the number of a GPU
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to and type(args[1] if len(args) > 1 else None) is int:
                args = (args[0], "cpu", *args[2:])
            return func(*map(to_cpu, args), **kwargs)

    return OnCpu()


def _with_arguments(changed: Mapping[str, Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function with other values of these arguments."""
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.arguments.update(changed)
    return call(*bound.args, **bound.kwargs)
