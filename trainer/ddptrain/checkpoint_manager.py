"""Saves checkpoints in the background, and selects and loads the checkpoint to resume from.

Rank 0 reads and writes the checkpoints, also the states that differ between ranks (see `Communication`). In a sharded
training, each rank reads its rows, and several write a shard.
"""

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddprank.object_store import ObjectStore, StoreError, Uploader
from ddptrain import compat
from ddptrain.balance import Balance
from ddptrain.checkpoint import (
    Checkpoint,
    DataFile,
    Shard,
    UnusableCheckpoint,
    check_files,
    data_files,
    first_file,
    manifest_path,
    map_checkpoint,
    map_tensors,
    read_manifest,
    whole,
    write_checkpoint,
)
from ddptrain.checkpoint_directory import (
    CheckpointDirectory,
    checkpoint_path,
    first_whole,
    read_again,
    read_checkpoint,
    step_of,
)
from ddptrain.communication import Communication, mean_state
from ddptrain.config import CheckpointOptions, shaping_options
from ddptrain.distributed import RankInfo, agree, broadcast, broadcast_state, gather
from ddptrain.errors import TrainError, config_error, log_warning, os_errors
from ddptrain.goodput import Goodput
from ddptrain.metrics import Metrics
from ddptrain.optimizer import match_strides
from ddptrain.training_state import TrainingState
from ddpwire import metrics as catalogue
from ddpwire import names
from ddpwire.events import EventLog
from ddpwire.exits import Exit

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

STUCK_S = 45.0  # after this time without progress, the disk counts as stuck
POLL_S = 0.05


class CheckpointManager:
    """The checkpoints of one training. ``directory`` is None on all ranks except rank 0.

    ``on_wait`` is called with the step number while the training loop waits for the disk.
    """

    def __init__(
        self,
        state: TrainingState,
        directory: CheckpointDirectory | None,
        metrics: Metrics,
        goodput: Goodput,
        events: EventLog,
        *,
        on_wait: Callable[[int], None],
    ) -> None:
        self._state = state
        self._shaping = shaping_options(state.options, batch_size=state.batch_size)
        self._epochs = state.options.training.epochs
        self._resumed: Path | None = None
        self.uploader: Uploader | None = None  # copies checkpoints to an object store; None if this rank copies none
        self._goodput = goodput
        self._events = events
        self._finder: CheckpointFinder | None = None
        self._saver: CheckpointSaver | None = None
        self._sharding, options = state.sharding, state.options.checkpoints
        has_ranks = state.communication is not None and state.communication.has_state
        self._communication = state.communication if has_ranks else None
        self._is_collective = self._sharding is not None or has_ranks
        self._path = partial(checkpoint_path, options.folder)
        shard = None if self._sharding is None else self._sharding.shard
        if directory is not None:
            check = check_files if self._sharding is None else self._check_files
            self._finder = CheckpointFinder(
                directory=directory, options=options, metrics=metrics, warn=log_warning, check=check
            )
        if directory is not None or shard is not None:
            self._saver = CheckpointSaver(directory, options, metrics, events, log_warning, on_wait, shard)

    def resume(self) -> tuple[Path, int, int | None] | None:
        """Load the checkpoint that ``--resume`` selects, on every rank. Raises TrainError.

        Return its path, its step, and the number of epochs of its training (None if unknown). Return None if there is
        no checkpoint. Then the training starts at step 0.
        """
        rank_info = self._state.world.rank_info
        with self._goodput.time_lost("restore"):
            selected = agree(rank_info, self._find)
            parts = dict(selected[1].parts) if selected else {}
            head = broadcast(rank_info, (selected[0], selected[1].step, selected[1].shaping) if selected else None)
            del selected  # the parts are freed one by one
            if head is None and not self._epochs and not self._state.options.model.pretrained:
                folder = self._state.options.checkpoints.folder
                raise TrainError(
                    Exit.NO_INPUT,
                    f"--epochs 0 only evaluates, but the folder '{folder}' contains no checkpoint",
                    hint="give --resume FILE, another --checkpoint-dir, or --pretrained FILE",
                )
            if head is None:
                return None
            path, step, shaping = head
            self._resumed = path
            if self._sharding is not None:
                parts = agree(rank_info, partial(_map_parts, path, rank_info))
            for name, part in self._state.parts.items():
                values = parts.pop(name, None)
                if self._sharding is None:
                    values = broadcast_state(rank_info, whole(values))
                else:
                    values = self._sharding.read_rows(part, values)
                agree(rank_info, partial(_load_part, path, name, part, values))
                del values
            if self._communication is not None and step < self._state.num_steps:  # else all evaluate the same weights
                self._communication.load_ranks(path, parts.pop("ranks", None), log_warning)
            if self._saver:
                self._saver.newest = path
        self._events.emit("checkpoint_loaded", step=step, seconds=self._goodput.lost_s["restore"], path=str(path))
        return path, step, shaping.get("epochs")

    def _find(self) -> tuple[Path, Checkpoint] | None:
        if self._finder is None:
            while self._sharding is not None and self._check_files(None):
                pass  # until rank 0 has selected a checkpoint
            return None
        try:
            if self._finder.options.store and self._saver is not None:
                self.uploader = self._open_store(self._finder.directory, self._finder.options)
                self._saver.uploader = self.uploader
            return self._finder.find(self._shaping)
        finally:
            if self._sharding is not None:
                self._check_files([])

    def _check_files(self, files: Sequence[DataFile] | None) -> bool:
        """Verify the files that rank 0 passes, each rank some of them. Return whether there were any.

        Every rank must call this. Rank 0 raises the first error.
        """
        rank_info = self._state.world.rank_info
        shared, failure = broadcast(rank_info, files) or [], None
        try:
            check_files(shared[rank_info.rank :: rank_info.size])
        except (UnusableCheckpoint, OSError) as error:
            failure = error
        failures = gather(rank_info, failure)
        if rank_info.is_first and (failed := next(filter(None, failures), None)):
            raise failed
        return bool(shared)

    def _open_store(self, directory: CheckpointDirectory, options: CheckpointOptions) -> Uploader:
        """Fetch the store's newest checkpoint, unless the folder has a newer one. Return the uploader."""
        here = directory.checkpoints()[::-1]
        try:
            store = ObjectStore(options.store)
            store.write_index(store.checkpoints())  # if it cannot be written, this is reported now
            with os_errors(Exit.CANNOT_WRITE, f"{directory.folder} cannot be written"):
                store.fetch_newest(directory.folder, (step_of(here[-1]) or 0) if here else None, log_warning)
        except StoreError as error:
            if not here or error.code == Exit.CONFIG:
                raise TrainError(error.code, str(error)) from None
            log_warning(f"{error}; the training continues with the checkpoints in {directory.folder}")
        keep, best = options.keep, options.keep_best
        uploader = Uploader(store, keep=keep, keep_best=best, events=self._events, warn=log_warning)
        for path in here:
            _upload(uploader, path)
        return uploader

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step of an epoch. Ranks that save together return the answer of rank 0."""
        options, due = self._state.options.checkpoints, self._saver is not None and self._saver.is_due(step)
        if options.every and step % options.every == 0:
            return True
        if self._is_collective and options.minutes:
            due = broadcast(self._state.world.rank_info, due)
        return due

    def save(self, step: int, accuracy: float | None) -> None:
        """Start to write a checkpoint in the background, unless this step already has one."""
        saver, sharding, rank_info = self._saver, self._sharding, self._state.world.rank_info
        with self._goodput.time_lost("checkpoint"):
            stuck = False
            if sharding is not None:  # all ranks write, or none
                stuck = any(gather(rank_info, saver is not None and not saver.wait_for_write(step)))
            wanted = saver is not None and saver.newest != self._path(step)
            if self._is_collective:
                wanted = broadcast(rank_info, wanted)
            ranks = self._communication.gather(step) if self._communication is not None and wanted else None
            if saver is not None and stuck:
                saver.skip(step)
            elif saver is not None and wanted:
                parts: dict[str, Any] = {name: part.state_dict() for name, part in self._state.parts.items()}
                if sharding is not None:
                    parts = sharding.own_rows(parts)
                if ranks is not None:
                    parts["ranks"] = ranks
                    if "model" in ranks[0]:  # for an export
                        parts["model"] = mean_state([state["model"] for state in ranks])
                # The epochs shape the learning rate; a resumed training may change them, and reports it.
                saver.save(step, parts, {**self._shaping, "epochs": self._epochs}, accuracy)

    def save_last(self, step: int, accuracy: float | None) -> Path | None:
        """Save the last step, and return its path. Save nothing with ``--epochs 0``. Raises TrainError."""
        if not self._epochs:
            return self._resumed
        problem, path = "", self._path(step)
        written = self.wait_for_write(step)
        again = written and self._saver is not None and self._saver.newest != path
        if broadcast(self._state.world.rank_info, again):  # the disk may have space again
            self.save(step, accuracy)
            written = self.wait_for_write(step)
        if self._saver is not None:
            if not written:
                problem = f"step {step} could not be saved: {path} has been waiting for the disk for {STUCK_S:g} s"
            elif self._saver.newest != path:
                before = (
                    "no earlier checkpoint exists" if self._saver.newest is None else f"{self._saver.newest} is intact"
                )
                problem = f"step {step} could not be saved as {path}; {before}"
        problem, path = broadcast(self._state.world.rank_info, (problem, path))
        if problem:
            raise TrainError(Exit.CANNOT_WRITE, problem)
        return path

    def wait_for_write(self, step: int | None = None) -> bool:
        """Wait until the current write is on the disk. Return False if the disk does not respond."""
        with self._goodput.time_lost("checkpoint"):
            return self._saver is None or self._saver.wait_for_write(step)


def _upload(uploader: Uploader, path: Path) -> None:
    """Copy a checkpoint to the store, unless it is incomplete."""
    with contextlib.suppress(UnusableCheckpoint, OSError):
        uploader.offer(step_of(path) or 0, [*data_files(path), manifest_path(path)], read_manifest(path).accuracy)


def _map_parts(path: Path, rank_info: RankInfo) -> dict[str, Any]:
    try:
        return dict(map_checkpoint(path).parts)
    except (UnusableCheckpoint, OSError) as error:
        message = f"rank {rank_info.rank} cannot read {path}, which rank 0 can read: {error}"
        raise TrainError(Exit.NO_INPUT, message, hint="give a path that all nodes share") from None


def _load_part(path: Path, name: str, part: "Stateful", values: dict[str, Any] | None) -> None:
    if values is None and isinstance(part, torch.amp.GradScaler | Balance):
        return  # the checkpoint was trained without it: fp16 begins with a new scale, and equal shares are measured
    values = {} if values is None and isinstance(part, Communication) else values  # trained in another way
    try:
        if values is None:
            raise RuntimeError(f"it has no {name!r}")
        if isinstance(part, torch.optim.Optimizer):
            for group, saved in zip(part.param_groups, values["param_groups"], strict=False):
                if missing := sorted(group.keys() - saved.keys()):  # another optimizer's state, which torch accepts
                    raise KeyError(missing[0])
        part.load_state_dict(values)
        if isinstance(part, torch.optim.Optimizer):
            match_strides(part)
    except (KeyError, RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()[:2]]  # torch's second line names the tensor
        reason = f"its {name} has no {error.args[0]!r}" if isinstance(error, KeyError) else " ".join(lines)
        raise config_error(f"{path} does not fit this training: {reason}") from None


@dataclass(frozen=True, kw_only=True)
class CheckpointFinder:
    """Selects the checkpoint to resume from. ``warn`` is called with one line for each unusable checkpoint."""

    directory: CheckpointDirectory
    options: CheckpointOptions
    metrics: Metrics
    warn: Callable[[str], None]
    check: Callable[[Sequence[DataFile]], object] = check_files  # of a sharded checkpoint

    def find(self, shaping: Mapping[str, Any]) -> tuple[Path, Checkpoint] | None:
        """Return the checkpoint that ``--resume`` selects, or None to start at step 0. Raises TrainError."""
        paths = self._checkpoints()
        started_again = os.environ.get(names.ATTEMPT, "1") != "1" and paths
        resume = "auto" if started_again else self.options.resume
        if resume == "never" and paths:
            raise config_error(
                f"--resume never, but the folder '{self.directory.folder}' contains {paths[0].name}",
                hint="give another --checkpoint-dir, or --resume auto",
            )
        selected = self._newest(paths) if resume in ("auto", "never") else self._given(first_file(Path(resume)))
        if selected is not None:
            self._check_same_config(*selected, shaping)
        return selected

    def _checkpoints(self) -> list[Path]:
        with os_errors(Exit.NO_INPUT, f"--checkpoint-dir {self.directory.folder} cannot be read"):
            return read_again(self.directory.checkpoints)

    def _newest(self, paths: list[Path]) -> tuple[Path, Checkpoint] | None:
        """Return the first complete checkpoint, and rename the corrupt ones before it. Raises TrainError.

        A checkpoint that cannot be read keeps its name, because it may be complete. If no checkpoint is complete, no
        checkpoint is renamed.
        """
        selected, bad = first_whole(paths, self._load)
        for torn, error in bad.items():
            how = "cannot be used"
            if selected is not None:
                how = "is skipped" if error.reason == "io" else self.directory.set_aside(torn)
                self.metrics.count(catalogue.CHECKPOINT_FALLBACKS)
            self.warn(f"{torn} {how}: {error.message}")
        count = len(bad) + self.directory.num_bad()
        if selected is None and count:
            raise TrainError(
                Exit.DATA,
                f"the folder '{self.directory.folder}' has no intact checkpoint (corrupt: {count})",
                hint="to start at step 0, delete the step-* files in this folder, or give another --checkpoint-dir",
            )
        return selected

    def _given(self, path: Path) -> tuple[Path, Checkpoint]:
        """Return the checkpoint in this file. A file without a manifest is not verified. Raises TrainError."""
        if not path.name:
            message = f"--resume {self.options.resume!r} is not a file; expected auto, never or a file"
            raise TrainError(Exit.NO_INPUT, message)

        def read(path: Path) -> Checkpoint:
            return self._load(path) if manifest_path(path).exists() else map_checkpoint(path)

        selected, bad = first_whole([path], read)
        if selected is None:
            error = bad[path]
            code = Exit.NO_INPUT if error.reason in ("io", "missing") else Exit.DATA
            expected = "; expected auto, never or a file" if error.reason == "io" else ""
            raise TrainError(code, f"--resume {path}: {error.message}{expected}")
        newer = [other for other in self._checkpoints() if (step_of(other) or 0) > selected[1].step]
        if newer:  # the next resume would use these, and this training's checkpoints would be deleted as older
            raise config_error(
                f"--resume {path} is older than {newer[0].name} in {self.directory.folder}",
                hint=f"to continue from {path.name}, give another --checkpoint-dir",
            )
        return selected

    def _load(self, path: Path) -> Checkpoint:
        began = time.monotonic()
        try:
            checkpoint = read_checkpoint(path, self.check)
            written_at, size_bytes = path.stat().st_mtime, sum(file.stat().st_size for file in data_files(path))
        except (UnusableCheckpoint, OSError) as error:
            reason = error.reason if isinstance(error, UnusableCheckpoint) else "io"
            self.metrics.count(catalogue.CHECKPOINT_FAILURES, "load", reason)
            raise
        seconds, step = time.monotonic() - began, checkpoint.step
        self.metrics.checkpoint("load", seconds=seconds, step=step, written_at=written_at, size_bytes=size_bytes)
        return checkpoint

    def _check_same_config(self, path: Path, checkpoint: Checkpoint, now: Mapping[str, Any]) -> None:
        """Raise TrainError if options that affect the weights have changed, unless --allow-changed-config is given."""
        before = dict(checkpoint.shaping)
        if "compress" in before:  # the name of the option in older checkpoints
            before["communication"] = {"none": "plain"}.get(before["compress"], before["compress"])
        changed = [name for name in now if name in before and before[name] != now[name]]
        changes = ", ".join(f"{name.replace('_', '-')} {before[name]} (now {now[name]})" for name in changed)
        if not changes:
            return
        if not self.options.allow_changed:
            self.metrics.count(catalogue.CHECKPOINT_FAILURES, "load", "incompatible")
            raise config_error(
                f"{path} was trained with {changes}",
                hint="give the same options, another --checkpoint-dir, or --allow-changed-config",
            )
        self.warn(f"{path} was trained with {changes}; continuing (--allow-changed-config)")


class Snapshot:
    """Copies a nested state to buffers on the CPU, which are reused. Tensors from a GPU are copied to pinned memory.

    The result of ``take`` is valid until the next call of ``take``.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any:
        """Return a copy of the state. Copies from a GPU are complete only after ``wait``."""
        sources: list[Tensor] = []
        copies: list[Tensor] = []

        def buffer_for(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
            source, kept = tensor.detach(), self._buffers.get(path)
            if kept is None or (kept.shape, kept.dtype, kept.stride()) != (source.shape, source.dtype, source.stride()):
                kept = self._buffers[path] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            sources.append(source)
            copies.append(kept)
            return kept

        copy = map_tensors(state, buffer_for)
        if sources:
            # The copy runs in the training's own stream, so the next step cannot change a tensor before it is copied.
            compat.copy_all(copies, sources)
        if any(source.is_cuda for source in sources):
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return copy

    def wait(self) -> None:
        """Wait until the copies are complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass
class CheckpointSaver:
    """Writes checkpoints, one at a time. A thread writes a copy of the state, so the training loop waits only for the
    copy.

    If a write fails, ``warn`` is called with one line. The training continues, and the previous checkpoint stays valid.
    ``on_wait`` is called with the step number while the training loop waits for the disk.
    """

    directory: CheckpointDirectory | None  # None on all ranks except rank 0
    options: CheckpointOptions
    metrics: Metrics
    events: EventLog
    warn: Callable[[str], None]
    on_wait: Callable[[int], None] = lambda _: None
    shard: Shard | None = None
    uploader: Uploader | None = None
    newest: Path | None = None  # the last checkpoint that was written or resumed from
    _snapshot: Snapshot = field(default_factory=Snapshot)
    _writing: threading.Thread | None = None
    _written_at: float = 0.0
    _waited_s: float = 0.0  # how long the loop waited for the copy
    _saved_at: float = field(default_factory=time.monotonic)

    def is_due(self, step: int) -> bool:
        """Return whether the options require a checkpoint in the middle of an epoch, after this step."""
        every, minutes = self.options.every, self.options.minutes
        return bool((every and step % every == 0) or (minutes and time.monotonic() - self._saved_at >= 60 * minutes))

    def save(self, step: int, parts: Mapping[str, Any], shaping: Mapping[str, Any], accuracy: float | None) -> None:
        """Copy the state, and start to write the copy."""
        if not self.wait_for_write(step):
            self.skip(step)
            return
        began = self._saved_at = time.monotonic()
        checkpoint = Checkpoint(step=step, shaping=shaping, parts=self._snapshot.take(parts), accuracy=accuracy)
        self._on_write()
        self._waited_s = time.monotonic() - began
        self._writing = threading.Thread(target=self._write, args=(checkpoint, began), daemon=True, name="checkpoint")
        self._writing.start()

    def skip(self, step: int) -> None:
        """Report that this step gets no checkpoint, because the disk of a rank does not respond."""
        self.metrics.count(catalogue.CHECKPOINT_FAILURES, "save", "io")
        self._failed(step, f"the previous checkpoint has been waiting for the disk for {STUCK_S:g} s")

    def wait_for_write(self, step: int | None = None) -> bool:
        """Wait until the current write is on the disk or has failed. Return False if the disk does not respond.

        ``step`` is passed to ``on_wait``. If it is None, the training has ended, and ``on_wait`` is not called.
        """
        while self._writing is not None and self._writing.is_alive():
            if time.monotonic() - self._written_at > STUCK_S:
                return False
            self._writing.join(POLL_S)
            if step is not None:
                self.on_wait(step)
        self._writing = None
        return True

    def _write(self, checkpoint: Checkpoint, began: float) -> None:
        folder = self.options.folder if self.directory is None else self.directory.folder
        path = checkpoint_path(folder, checkpoint.step)
        try:
            self._snapshot.wait()
            shard = None if self.shard is None else replace(self.shard, gather=self._gather)
            size_bytes = write_checkpoint(path, checkpoint, on_write=self._on_write, shard=shard)
        except Exception as error:  # a failed checkpoint does not end the training
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            self.metrics.count(catalogue.CHECKPOINT_FAILURES, "save", "enospc" if full else "io")
            reason = error.strerror if isinstance(error, OSError) else error
            self._failed(checkpoint.step, f"{path}: {reason}")
            return
        self.newest = path
        if self.directory is None:
            return
        step, seconds = checkpoint.step, time.monotonic() - began
        facts: dict[str, Any] = {"waited_s": round(self._waited_s, 4), "bytes": size_bytes, "path": str(path)}
        self.metrics.checkpoint("save", seconds=seconds, step=step, written_at=time.time(), size_bytes=size_bytes)
        self.events.emit("checkpoint_saved", step=step, seconds=seconds, **facts)
        if self.uploader:
            _upload(self.uploader, path)
        try:
            retained = self.directory.delete_old(keep=self.options.keep, keep_best=self.options.keep_best, written=path)
        except OSError as error:  # no failure of this checkpoint, which is on the disk
            self.warn(f"an old checkpoint cannot be deleted: {error.filename}: {error.strerror}")
        else:
            self.metrics.gauge(catalogue.CHECKPOINTS_RETAINED, retained)

    def _gather(self, value: Any) -> list[Any] | None:
        """Exchange the results of the writers. The timeout of their process group limits this exchange.

        ``wait_for_write`` does not count the duration of this exchange as time in which the disk does not respond.
        """
        self._written_at = math.inf
        try:
            return self.shard.gather(value) if self.shard else None
        finally:
            self._on_write()

    def _failed(self, step: int, reason: str) -> None:
        self.warn(f"no checkpoint of step {step}: {reason}")
        self.events.emit("checkpoint_failed", step=step, message=reason)

    def _on_write(self) -> None:
        self._written_at = time.monotonic()
