"""The observer of ``ddpctl rehearse`` in a rank: it records what the script does, and disturbs it once.

It exists only if names.REHEARSAL is set (rehearsal.py). The script is not changed: the observer wraps public functions
of torch, and listens to Python's audit events. It appends facts as JSON lines to a file of this process. A fact's key
says what it is: start, group, begin (before the first step), step, epoch, save, load, file, at (the disturbance), cut,
end.
"""

import ctypes
import functools
import hashlib
import importlib
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddprun.system import compat, processes
from ddpwire import names

ELEMENTS = 1 << 16  # of each tensor, for its fingerprint
PROBES = 16  # tensors that are also compared to a number of digits
GO_S, SETTLE_S, SLOW_S = 15.0, 0.5, 2.0
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")  # they end by themselves


class Observer:
    """Records the facts of this process. In a process that the script forks, it does nothing."""

    def __init__(self, plan: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._plan, self._pid = plan, os.getpid()
        self._folder = Path(plan["facts"])
        self.rank, self.world = int(env[names.RANK]), int(env[names.WORLD_SIZE])
        self._file = os.open(self._folder / f"{self.rank}.{self._pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        runtime = str(Path(env.get("XDG_RUNTIME_DIR") or "/run").absolute())
        self._not_of_script = ("/proc/", "/sys/", "/dev/null", "/dev/tty", f"{runtime}/", f"{self._folder.parent}/")
        self._step = 0
        self._clock: Any = None  # the first optimizer that takes a step
        self._loss: float | None = None
        self._batches: list[tuple[int, list[int]]] = []
        self._sizes: dict[str, int] = {}  # of the files that the script has saved
        self._names: set[str] = set()
        self._fills = False
        attempt, place = int(env[names.ATTEMPT]), {"node": int(env[names.RANKS_NODE]), "world": self.world}
        self._acts = dict(plan["act"]) if attempt == 1 else {}
        self._seed = plan["seed"] + 100 * attempt
        self.write("start", self.rank, pid=self._pid, attempt=attempt, **place)

    def write(self, kind: str, value: object, **more: object) -> None:
        """Append a fact."""
        if os.getpid() == self._pid:
            fact = {kind: value, "time": time.time(), **more}
            os.write(self._file, json.dumps(fact, default=str).encode() + b"\n")

    def install(self) -> None:
        """Wrap torch's functions in this process, and seed the generators that the script does not seed.

        A process that resumes gets other seeds, as on a cluster. The first ones are alike, so that runs can be
        compared.
        """
        torch = importlib.import_module("torch")
        optimizer = importlib.import_module("torch.optim.optimizer")
        self.torch, self.dist = torch, importlib.import_module("torch.distributed")
        torch.manual_seed(self._seed + self.rank)
        random.seed(self._seed + self.rank)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(self._seed + self.rank)
        optimizer.register_optimizer_step_pre_hook(lambda stepped, *_: self._begin(stepped))
        optimizer.register_optimizer_step_post_hook(lambda stepped, *_: self._end_step(stepped))
        _wrap(torch.Tensor, "backward", self._backward)
        _wrap(torch, "save", functools.partial(self._save, 1, "f"))
        _wrap(torch, "load", functools.partial(self._load, 0, "f"))
        dcp = importlib.import_module("torch.distributed.checkpoint")
        for name, wrapper in (("save", self._save), ("async_save", self._save), ("load", self._load)):
            _wrap(dcp, name, functools.partial(wrapper, 9, "checkpoint_id"))
        _wrap(self.dist, "init_process_group", self._init_group)
        _wrap(importlib.import_module("torch.distributed.distributed_c10d"), "init_process_group", self._init_group)
        _wrap(importlib.import_module("torch.nn.parallel").DistributedDataParallel, "forward", self._forward)
        spawn = importlib.import_module("torch.multiprocessing.spawn")
        _wrap(spawn, "start_processes", _start_observed)
        importlib.import_module("torch.multiprocessing").start_processes = spawn.start_processes  # type: ignore[attr-defined]
        if not compat.watch_batches(self._batch, self._exhausted):
            self.write("blind", "this version of torch does not show which samples a DataLoader takes")
        sys.addaudithook(self._audit)

    # What the script does

    def _init_group(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        self.rank, self.world = self.dist.get_rank(), self.dist.get_world_size()
        self.write("group", self.rank, world=self.world)
        return result

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._once("ddp", "DistributedDataParallel")
        return call(*args, **kwargs)

    def _backward(self, call: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(loss, *args, **kwargs)
        if os.getpid() == self._pid and loss.numel() == 1:
            self._loss = float(loss.detach())
        return result

    def _batch(self, epoch: int, indices: Any, loader: Mapping[str, Any]) -> None:
        if os.getpid() == self._pid:
            self._batches.append((epoch, [int(index) for index in indices] if isinstance(indices, list) else []))
            self._once("loader", json.dumps(loader))

    def _exhausted(self, epoch: int) -> None:
        self.write("epoch", epoch, step=self._step, batches=self._batches)  # those that no step has used

    def _save(self, place: int, keyword: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = _path(kwargs.get(keyword, args[place] if len(args) > place else None))
        if not path or os.getpid() != self._pid:  # into memory, as broadcast_object_list does
            return call(*args, **kwargs)
        began, error = time.time(), ""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        fills = self._fills and self._sizes
        if fills:  # a write beyond half of the last checkpoint's size fails, inside of torch's own code
            self._fills = False
            self.write("at", self._step, do="disk")
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(1, [*self._sizes.values()][-1] // 2), limits[1]))
        try:
            return call(*args, **kwargs)
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            raise
        finally:
            if fills:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            size = _size(path)
            if not error and size:
                self._sizes[path] = size
            seconds = time.time() - began
            self.write("save", path, step=self._step, bytes=size, seconds=seconds, error=error, full=bool(fills))

    def _load(self, place: int, keyword: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if path := _path(kwargs.get(keyword, args[place] if len(args) > place else None)):
            self.write("load", path, step=self._step, bytes=_size(path))
        return call(*args, **kwargs)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
            path = os.path.join(os.getcwd(), args[0])  # noqa: PTH109, PTH118 (in each open: fast)
            if args[2] & (os.O_WRONLY | os.O_RDWR) and not path.startswith(self._not_of_script):
                self._once("file", path)
        elif event == "os.truncate" and isinstance(args[0], int):  # multiprocessing.shared_memory
            path = os.readlink(f"/proc/self/fd/{args[0]}")  # noqa: PTH115
            if path.startswith("/dev/shm/"):  # noqa: S108
                self._once("file", path)

    def _once(self, kind: str, value: str) -> None:
        if os.getpid() == self._pid and value not in self._names:
            self._names.add(value)
            self.write(kind, value, step=self._step)

    # Steps

    def _begin(self, stepped: Any) -> None:
        if self._clock is None and os.getpid() == self._pid:
            self._clock = stepped
            self.write("begin", 0, **self._state(), batches=len(self._batches))
        if stepped is self._clock and self._step == self._plan["steps"] and os.getpid() == self._pid:
            self._cut()

    def _end_step(self, stepped: Any) -> None:
        if stepped is not self._clock or os.getpid() != self._pid:
            return
        self._step += 1
        client: Any = sys.modules.get("ddpwire.client")
        reported = getattr(client, "_last_step", 0)
        batches, self._batches = self._batches, []
        self.write("step", self._step, loss=self._loss, reported=reported, batches=batches, **self._state())
        self._act()

    def _state(self) -> dict[str, Any]:
        """Return fingerprints of the weights and of the optimizer's state, as they are now."""
        groups = self._clock.param_groups
        weights = [tensor for group in groups for tensor in group["params"]]
        values = self._clock.state.values()
        state = [value for one in values for _, value in sorted(one.items(), key=str) if self.torch.is_tensor(value)]
        sharded = any(hasattr(tensor, "to_local") for tensor in weights)
        with self.torch.no_grad():
            digest, probe = self._fingerprint(weights)
            state_digest = self._fingerprint(state)[0] if any(bool(tensor.any()) for tensor in map(_local, state)) else ""
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        return {"weights": digest, "probe": probe, "state": state_digest, "lr": rates, "sharded": sharded}

    def _fingerprint(self, tensors: Iterable[Any]) -> tuple[str, list[float]]:
        total, probe = hashlib.blake2b(digest_size=8), []
        for tensor in tensors:
            flat = _local(tensor).detach().reshape(-1)[:ELEMENTS].contiguous().cpu()
            data = flat.view(self.torch.uint8)
            total.update((ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b"")
            if len(probe) < PROBES:
                double = flat.double()
                probe.append(float(double @ self.torch.arange(double.numel(), dtype=double.dtype).cos()))
        return total.hexdigest(), [value if math.isfinite(value) else 0.0 for value in probe]

    # The disturbance

    def _act(self) -> None:
        acts = self._acts
        if self._step != acts.get("step") or acts["rank"] not in (None, self.rank):
            return
        do = acts["do"]
        self._fills = do == "disk"
        if do != "disk":
            self.write("at", self._step, do=do)
        if do == "kill":
            os.kill(self._pid, signal.SIGKILL)
        elif do == "wait":  # rehearsal.py now sends signals, or kills the node
            _await(self._folder / "go", GO_S)
            _pause(SETTLE_S)
        elif do == "sleep":
            _pause(SLOW_S)
        elif do == "raise":
            raise RuntimeError(f"ddpctl rehearse: an exception after step {self._step}")

    def _cut(self) -> None:
        """End this process after the last step to observe, when every rank is about to take another one."""
        self.write("cut", self._step)
        (self._folder / f"cut-{self.rank}").touch()
        end = time.monotonic() + GO_S
        while len([*self._folder.glob("cut-*")]) < self.world and time.monotonic() < end:
            time.sleep(0.02)
        os._exit(0)

    def end(self, code: int, error: str) -> None:
        """Record how the script ended, and which processes it leaves. Call this when the script has ended."""
        session = os.getsid(0)
        own = {*processes.descendants(self._pid)}
        own |= {one.pid for one in processes.list_processes() if one.session == session and one.alive}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environ = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{names.REHEARSAL}={os.environ.get(names.REHEARSAL)}".encode() in environ:
                own |= {int(path.name)} if f"{names.RANK}={os.environ.get(names.RANK)}".encode() in environ else set()
        lines = [line for pid in sorted(own - {self._pid}) if (line := _command_line(pid))]
        left = [line for line in lines if not any(helper in line for helper in HELPERS)]
        self.write("end", code, error=error[:300], left=left)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by ``wrapper``, which gets the function as its first argument."""
    call = getattr(owner, name, None)
    if call is None:
        return

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(call, *args, **kwargs)

    setattr(owner, name, wrapped)


def _start_observed(call: Callable[..., Any], function: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    return call(functools.partial(_observe_and_call, function), *args, **kwargs)


def _observe_and_call(function: Callable[..., None], rank: int, *args: Any) -> None:
    """Call the function that a rank passes to torch.multiprocessing.spawn, and observe its process."""
    observer = observe({**os.environ, names.RANK: str(rank)})
    function(rank, *args)
    if observer:
        observer.end(0, "")


def observe(env: Mapping[str, str]) -> Observer | None:
    """Begin to observe this process if it is to be observed."""
    if names.REHEARSAL not in env:
        return None
    observer = Observer(json.loads(env[names.REHEARSAL]), env)
    observer.install()
    return observer


def _await(path: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def _pause(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def _path(target: object) -> str:
    """Return the path of what a function of torch saves or loads, or "" if it is no file."""
    path = target if isinstance(target, str | os.PathLike) else getattr(target, "name", "")
    return os.path.abspath(path) if path and isinstance(path, str | os.PathLike) else ""  # noqa: PTH100 (no Path: fast)


def _size(path: str) -> int:
    try:
        place = Path(path)
        return sum(one.stat().st_size for one in place.rglob("*")) if place.is_dir() else place.stat().st_size
    except OSError:
        return 0


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
