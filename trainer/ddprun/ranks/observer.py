"""The observer of ``ddpctl rehearse`` in a rank: it records what the script does, and disturbs it once.

It exists only if names.REHEARSAL is set (ddprun.rehearsal). The script is not changed: the observer wraps functions of
torch, and listens to Python's audit events. It appends facts as JSON lines to a file of this process. The first key of
a fact is its kind: start, group (init_process_group), loader, begin (before the first step), step, epoch (the end of an
iteration over a DataLoader), save, load, file (opened to be written), at (the disturbance), error (of the observer),
cut, end.
"""

import contextlib
import ctypes
import hashlib
import importlib
import inspect
import json
import math
import operator
import os
import random
import resource
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddprank.resume import opened_path
from ddprun.ranks import cpu_devices
from ddprun.system import compat, processes
from ddpwire import names

ELEMENTS = 1 << 16  # of each tensor, for its fingerprint
PROBES = 16  # tensors that are also compared to a number of digits
GO_S, SETTLE_S, SLOW_S = 15.0, 0.5, 2.0  # for the disturbance to come; to take effect; of a slow rank
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")  # end by themselves


class Observer:
    """Records the facts of this process. It does nothing in a process that the script forks."""

    def __init__(self, plan: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._plan, self._env, self._pid, self._folder = plan, env, os.getpid(), Path(plan["facts"])
        self._rank, self._world, attempt = (int(env[name]) for name in (names.RANK, names.WORLD_SIZE, names.ATTEMPT))
        self._file = os.open(self._folder / f"{self._rank}.{self._pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        own = ("/proc", "/sys", "/dev/null", "/dev/tty", env["XDG_RUNTIME_DIR"], self._folder.parent)
        self._not_of_script = tuple(map(str, own))
        self._step = 0
        self._clock: Any = None  # the first optimizer that takes a step
        self._loss: float | None = None
        self._input = ""  # the fingerprint of what a module got first since the last step
        self._batches: list[tuple[int, list[int]]] = []  # since the last step
        self._size = 0  # of the largest file of the last save
        self._noted: set[str] = set()
        self._fills = self._has_gradients = self._trains = False
        self._acts = plan["act"] if attempt == 1 else {}
        self._seed = plan["seed"] + 100 * attempt + self._rank
        self._write("start", self._rank, pid=self._pid, attempt=attempt)

    def _write(self, kind: str, value: object, **more: object) -> None:
        if os.getpid() == self._pid:
            os.write(self._file, json.dumps({kind: value, "time": time.time(), **more}).encode() + b"\n")

    def _write_once(self, kind: str, value: str, **more: Callable[[], object]) -> None:
        if os.getpid() == self._pid and value not in self._noted:
            self._noted.add(value)
            self._write(kind, value, **{name: read() for name, read in more.items()})

    def install(self) -> None:
        """Wrap torch's functions, and seed the generators, which the script may seed again."""
        if self._plan["gpus"]:
            cpu_devices.install(self._plan["gpus"])
        load = importlib.import_module
        torch, dcp, optimizer = load("torch"), load("torch.distributed.checkpoint"), load("torch.optim.optimizer")
        self._torch, self._dist = torch, load("torch.distributed")
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(self._seed)
        before, note = self._guard(self._before_step), self._guard(self._note_step)
        compat.before_steps(before)
        optimizer.register_optimizer_step_post_hook(lambda stepped, *_: self._after_step(stepped, note))
        load("torch.nn.modules.module").register_module_forward_pre_hook(self._guard(self._on_forward))
        compat.wrap(torch.Tensor, "backward", self._backward)
        for module, save, load_, keyword in ((torch, 1, 0, "f"), (dcp, 9, 9, "checkpoint_id")):
            compat.wrap(module, "save", partial(self._save, save, keyword))
            compat.wrap(module, "load", partial(self._load, load_, keyword))
        for module in (self._dist, self._dist.distributed_c10d):
            compat.wrap(module, "init_process_group", self._init_group)
        compat.change_spawned(lambda function: partial(_observe_and_call, function))
        compat.watch_batches(self._guard(self._on_batch), self._guard(self._on_epoch))
        sys.addaudithook(self._guard(self._audit))

    def _guard(self, observe: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that records an exception of ``observe``, but raises that of a signal handler."""

        def guarded(*args: Any) -> None:
            try:
                observe(*args)
            except Exception as failure:
                if _is_of_signal_handler(failure):
                    raise
                with contextlib.suppress(OSError):
                    self._write_once("error", f"{observe.__name__}: {failure!r}"[:200])

        return guarded

    # What the script does

    def _init_group(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        self._rank, self._world = self._dist.get_rank(), self._dist.get_world_size()
        self._write("group", self._rank, world=self._world)
        return result

    def _backward(self, call: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        result, self._has_gradients = call(loss, *args, **kwargs), True
        try:
            self._loss = float(loss.detach()) if loss.numel() == 1 else self._loss
        except Exception as failure:  # such as of a loss on the meta device
            if _is_of_signal_handler(failure):
                raise
        return result

    def _on_forward(self, module: Any, args: tuple[Any, ...]) -> None:
        if not self._input and module.training and self._torch.is_grad_enabled():
            tensors = [value for value in args if self._torch.is_tensor(value)]
            self._input = self._fingerprint(map(_local, tensors))[0] if tensors else ""

    def _on_batch(self, epoch: int, indices: Any) -> None:
        self._write_once("loader", "DataLoader")
        self._batches.append((epoch, [*map(_number, indices)] if isinstance(indices, list) else []))

    def _on_epoch(self, epoch: int) -> None:
        self._write("epoch", epoch, batches=self._batches)  # those that no step has used

    def _save(self, place: int, keyword: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = _path(kwargs.get(keyword, args[place] if len(args) > place else None))
        if not path or os.getpid() != self._pid:  # into memory, as broadcast_object_list does
            return call(*args, **kwargs)
        limits, error = resource.getrlimit(resource.RLIMIT_FSIZE), ""
        if fills := self._fills and self._size > 0:  # a write beyond half of the last size fails, in torch's own code
            self._fills = False
            self._write("at", self._step)
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(1, self._size // 2), limits[1]))
        try:
            return call(*args, **kwargs)
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0][:100]
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            self._size = _size(path) or self._size
            self._write("save", path, step=self._step, error=error, full=fills)

    def _load(self, place: int, keyword: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if path := _path(kwargs.get(keyword, args[place] if len(args) > place else None)):
            self._write("load", path)
        return call(*args, **kwargs)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        path, writes = opened_path(args) if event == "open" else ("", False)
        if event == "os.truncate" and isinstance(args[0], int):  # by multiprocessing.shared_memory
            path, writes = os.readlink(f"/proc/self/fd/{args[0]}"), True  # noqa: PTH115
        if writes and not path.startswith(self._not_of_script):
            is_shared = event == "os.truncate" and path.startswith("/dev/shm/")  # noqa: S108 (truncated when made)
            # The event comes before the file is opened. A file that exists is not the script's to leave behind.
            self._write_once("file", path, existed=lambda: os.path.lexists(path) and not is_shared)

    # Steps

    def _before_step(self, stepped: Any) -> None:
        # torch.distributed.checkpoint takes a step without gradients and rates, to make an optimizer's state
        self._trains = self._has_gradients or any(group.get("lr", 1) for group in stepped.param_groups)
        if os.getpid() != self._pid or not self._trains:
            return
        if self._clock is None:
            self._clock = stepped
            epochs = [epoch for epoch, _ in self._batches]
            self._write("begin", 0, **self._state(), batches=epochs.count(epochs[-1]) if epochs else 0)
        if stepped is self._clock and self._step == self._plan["steps"]:
            self._cut()

    def _after_step(self, stepped: Any, note: Callable[[], None]) -> None:
        if stepped is not self._clock or os.getpid() != self._pid or not self._trains:
            return
        self._step, self._has_gradients = self._step + 1, False
        note()
        if self._step == self._acts.get("step") and self._acts["rank"] in (None, self._rank):
            self._disturb(self._acts["do"])

    def _note_step(self) -> None:
        reported = getattr(sys.modules.get("ddprank.client"), "_last_step", 0)
        more = {"loss": self._loss, "reported": reported, "batches": self._batches, "input": self._input}
        self._batches, self._input = [], ""
        self._write("step", self._step, **more, **self._state())

    def _state(self) -> dict[str, Any]:
        """Return fingerprints of the weights and of the optimizer's state."""
        groups = self._clock.param_groups
        weights = [tensor for group in groups for tensor in group["params"]]
        values = [value for state in self._clock.state.values() for value in _values(state)]
        with self._torch.no_grad():
            state = [_local(value) for value in values if self._torch.is_tensor(value)]
            digest, probe = self._fingerprint(map(_local, weights))
            state_digest = self._fingerprint(state)[0] if any(bool(tensor.any()) for tensor in state) else ""
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        sharded = any(hasattr(tensor, "to_local") for tensor in weights)
        return {"weights": digest, "probe": probe, "state": state_digest, "lr": rates, "sharded": sharded}

    def _fingerprint(self, tensors: Iterable[Any]) -> tuple[str, list[float]]:
        total, probe = hashlib.blake2b(digest_size=8), list[float]()
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)[:ELEMENTS].contiguous().cpu()
            data = flat.view(self._torch.uint8)
            total.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b"")
            if len(probe) < PROBES:
                double = flat.double()
                probe.append(float(double @ self._torch.arange(double.numel(), dtype=double.dtype).cos()))
        return total.hexdigest(), [value if math.isfinite(value) else 0.0 for value in probe]

    def _disturb(self, do: str) -> None:
        self._fills = do == "disk"
        if self._fills:
            return
        self._write("at", self._step)
        if do == "kill":
            os.kill(self._pid, signal.SIGKILL)
        elif do == "wait":  # until ddprun.rehearsal has sent signals or killed a node
            self._noted.clear()  # a file that is written from now on is noted again
            _pause(GO_S, (self._folder / "go").exists)
            _pause(SETTLE_S)
        elif do == "sleep":
            _pause(SLOW_S)
        else:
            raise RuntimeError(f"ddpctl rehearse: an exception after step {self._step}")

    def _cut(self) -> None:
        """End this process after the last step to observe, when every rank is about to take another one."""
        self._write("cut", self._step)
        (self._folder / f"cut-{self._rank}").touch()
        _pause(GO_S, lambda: len([*self._folder.glob("cut-*")]) >= self._world)
        os._exit(0)

    def end(self, code: int) -> None:
        """Record how the script ended, and which processes it leaves: the rank's descendants, in any session."""
        marks = {f"{name}={self._env[name]}".encode() for name in (names.RANK, names.REHEARSAL)}
        own = {*processes.descendants(self._pid)}
        for process in processes.list_processes():
            is_marked = process.session == self._pid or marks <= {*_read(process.pid, "environ").split(b"\0")}
            own |= {process.pid} if process.alive and is_marked else set()
        lines = [_read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace") for pid in own - {self._pid}]
        remaining = [line.strip() for line in lines if line and not any(helper in line for helper in HELPERS)]
        self._write("end", code, left=sorted(remaining))


def _is_of_signal_handler(failure: Exception) -> bool:
    """Return whether a signal handler has raised this: it is the function that got the frame in which it was called."""
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        values = [*frame.f_locals.values()]
        values += [item for value in values if type(value) is tuple for item in value]  # of a handler with *args
        if frame.f_back and any(value is frame.f_back for value in values):
            return True
    return False


def _observe_and_call(function: Callable[..., None], rank: int, *args: Any) -> None:
    """Call the function that a rank passes to torch.multiprocessing.spawn, and observe its process."""
    observe({**os.environ, names.RANK: str(rank)})
    own, init = getattr(function, "__globals__", {}), importlib.import_module("torch.distributed").init_process_group
    if own.get(init.__name__) is inspect.unwrap(init):  # the script imported it by its name before it was wrapped
        own[init.__name__] = init
    function(rank, *args)  # what it leaves is a descendant of the rank, whose observer sees it


def observe(env: Mapping[str, str]) -> Observer:
    """Begin to observe this process."""
    observer = Observer(json.loads(env[names.REHEARSAL]), env)
    observer.install()
    return observer


def _number(index: object) -> int:
    """Return a sample's index, and a negative number for one that is no integer: equal in all processes."""
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return -1 - zlib.crc32(repr(index).encode())


def _values(state: object) -> list[Any]:
    """Return the values of a parameter's state in an optimizer, which may keep anything there."""
    if not isinstance(state, Mapping):
        return [state]
    return [value for _, value in sorted(state.items(), key=lambda item: str(item[0]))]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _pause(seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_over():
        time.sleep(0.01)


def _path(target: object) -> str:
    """Return the path of what a function of torch saves or loads, or "" if it is no file."""
    path = target if isinstance(target, str | os.PathLike) else getattr(target, "name", "")
    try:
        return os.path.abspath(path) if path and isinstance(path, str | os.PathLike) else ""  # noqa: PTH100
    except OSError:  # the current folder was removed
        return ""


def _size(path: str) -> int:
    """Return the size of a file, or of the largest file in a folder."""
    place = Path(path)
    try:
        return max((file.stat().st_size for file in (place.rglob("*") if place.is_dir() else (place,))), default=0)
    except OSError:
        return 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
