"""Checkpoints in an object store (s3://, gs://, ...), through fsspec: uploaded in the background, and fetched.

    URL/step-00000450/step-00000450.pt    the files of a checkpoint, under their own names
    URL/checkpoints.json                  the index: [{"step", "accuracy", "files": [{"name", "bytes", "modified",
                                          "sha256"}, ...]}, ...], the newest first. The manifest of
                                          a checkpoint, if there is one, is the last of its files.

A checkpoint is in the store once the index lists it. The index is written last, and replaced as a whole.
``python -m ddprank.object_store URL FOLDER [--best]`` fetches all checkpoints, or the most accurate one.
"""

import contextlib
import hashlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ddpwire.events import EventLog
from ddpwire.exits import Exit
from ddpwire.run_files import publish_part

INDEX = "checkpoints.json"
CHUNK = 8 << 20  # bytes of a request
STALL_S = 300.0  # a wait for an upload ends if no part is written or read for this time,
STOP_WAIT_S = 15.0  # or this long after a request to stop: half of the default grace period
# With the drivers' defaults, a call to a store that does not answer takes 25 minutes.
S3_LIMITS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 1}}}


class StoreError(Exception):
    """An error of the object store.

    ``code`` is CONFIG, UNAVAILABLE, NO_INPUT for a missing object, or DATA for a damaged object.
    """

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


class ObjectStore:
    """The checkpoints of one run in a store. The methods raise StoreError, or OSError for an error of a local file."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.num_parts = 0  # parts of files that were written or read so far
        self._index: list[dict[str, Any]] | None = None  # None: not read yet
        try:
            import fsspec

            self._fs, root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, **(S3_LIMITS if url.startswith("s3:") else {})
            )
        except (ImportError, ValueError) as error:
            driver = {"s3": "s3fs", "gs": "gcsfs"}.get(url.partition(":")[0], "fsspec and its driver")
            raise StoreError(Exit.CONFIG, f"{url} needs pip install {driver}: {error}") from None
        self._root = str(root).rstrip("/")

    @contextlib.contextmanager
    def _at(self, name: str, step: int | None = None) -> Iterator[str]:
        """Yield the path of an object for the fsspec driver. Turn every error in the block into a StoreError."""
        path = name if step is None else f"step-{step:08d}/{name}"
        try:
            yield f"{self._root}/{path}"
        except Exception as error:
            code = Exit.NO_INPUT if isinstance(error, FileNotFoundError) else Exit.UNAVAILABLE
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise StoreError(code, f"{self.url}/{path}: {reason}") from error

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the index, the newest checkpoint first. It is empty in a new store."""
        if self._index is None:
            try:
                with self._at(INDEX) as path:
                    self._index = _read_index(self._fs.cat_file(path))
            except StoreError as error:
                if error.code != Exit.NO_INPUT:
                    raise
        return self._index or []

    def write_index(self, checkpoints: Iterable[dict[str, Any]]) -> None:
        """Replace the index."""
        kept = sorted(checkpoints, key=_newest_first)
        with self._at(INDEX) as path:
            self._fs.pipe_file(path, json.dumps(kept, indent=1).encode())
        self._index = kept

    def delete(self, checkpoint: dict[str, Any]) -> None:
        """Delete the files of a checkpoint that the index no longer lists."""
        for file in checkpoint["files"]:
            with self._at(file["name"], checkpoint["step"]) as name, contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(name)

    def put(self, step: int, path: Path) -> dict[str, Any]:
        """Upload a file, read it back to verify it, and return its entry for the index."""
        with path.open("rb") as data:
            status, sha256 = os.fstat(data.fileno()), hashlib.file_digest(data, "sha256").hexdigest()
        file = {"name": path.name, "bytes": status.st_size, "modified": int(status.st_mtime), "sha256": sha256}
        from fsspec.callbacks import Callback

        with self._at(path.name, step) as name:  # drivers call back after each part
            self._fs.put_file(str(path), name, callback=Callback(hooks={"count": self._count_part}))
        digest = hashlib.sha256()
        for chunk in self._chunks(step, file):
            digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise self._damaged(file)
        return file

    def _count_part(self, *_: Any, **__: Any) -> None:
        self.num_parts += 1

    def fetch_newest(self, folder: Path, newest_here: int | None, warn: Callable[[str], None]) -> None:
        """Fetch the newest undamaged checkpoint, unless it is older than ``newest_here``.

        ``newest_here`` is the step of the folder's newest checkpoint, or None. Damaged checkpoints are removed from the
        index. Later checkpoints of the same steps can then be uploaded. Raises StoreError if all checkpoints in the
        store are damaged and the folder has no checkpoint.
        """
        damaged: dict[int, StoreError] = {}
        for checkpoint in self.checkpoints():
            if newest_here is not None and checkpoint["step"] < newest_here:
                break
            try:
                self.fetch(checkpoint, folder)
                break
            except StoreError as error:
                if error.code not in (Exit.DATA, Exit.NO_INPUT):
                    raise
                damaged[checkpoint["step"]] = error
        else:
            if damaged and newest_here is None:
                raise next(iter(damaged.values()))
        for damage in damaged.values():
            warn(f"{damage}; an older checkpoint is used")
        if damaged:
            self.write_index(kept for kept in self.checkpoints() if kept["step"] not in damaged)

    def fetch(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Fetch those files of a checkpoint that are missing in the folder or differ from the store's files.

        A file gets its final name once it is verified. If an earlier call left an incomplete file, only the rest of the
        file is fetched.
        """
        for file in checkpoint["files"]:
            part, target = folder / f"{file['name']}.fetched", folder / file["name"]
            with contextlib.suppress(OSError):
                if (target.stat().st_size, int(target.stat().st_mtime)) == (file["bytes"], file["modified"]):
                    continue
            is_continued = part.exists()
            with part.open("ab") as out:
                for chunk in self._chunks(checkpoint["step"], file, out.tell()):
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            if not publish_part(part, target, file["sha256"], file["modified"] * 10**9):
                if not is_continued:
                    raise self._damaged(file)
                self.fetch(checkpoint, folder)  # the incomplete file may have been damaged, or from another upload
                return

    def _chunks(self, step: int, file: dict[str, Any], start: int = 0) -> Iterator[bytes]:
        for at in range(start, file["bytes"], CHUNK):
            with self._at(file["name"], step) as name:
                data = bytes(self._fs.cat_file(name, start=at, end=min(at + CHUNK, file["bytes"])))
            self.num_parts += 1
            yield data

    def _damaged(self, file: dict[str, Any]) -> StoreError:
        return StoreError(Exit.DATA, f"{file['name']} of {self.url} does not match its SHA-256, {file['sha256']}")


def _read_index(text: bytes) -> list[dict[str, Any]]:
    """Return the index in ``text``. Raises ValueError if the text is not a valid index.

    A file name that is a path is not valid, because the path could lead out of the folder.
    """
    index = json.loads(text)
    try:
        for checkpoint in index:
            files = checkpoint["files"]
            values = [checkpoint["step"], *(file[key] for file in files for key in ("bytes", "modified"))]
            texts = [file[key] for file in files for key in ("name", "sha256")]
            is_good = all(type(value) is int and value >= 0 for value in values) and all(
                re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) for name in texts
            )
            if not is_good or not isinstance(checkpoint["accuracy"], int | float | None):
                raise ValueError
        return sorted(index, key=_newest_first)
    except (ValueError, TypeError, KeyError):
        raise ValueError("it is not an index of checkpoints") from None


def _newest_first(checkpoint: dict[str, Any]) -> int:
    return -int(checkpoint["step"])


def best_of(checkpoints: Iterable[dict[str, Any]]) -> int | None:
    """Return the step of the most accurate checkpoint, or None if no accuracy is known."""
    evaluated = ((entry["accuracy"], entry["step"]) for entry in checkpoints if entry["accuracy"] is not None)
    return max(evaluated, default=(0, None))[1]


class Uploader:
    """Uploads checkpoints in a thread, and retries each upload that fails.

    ``keep`` and ``keep_best`` determine which checkpoints the store keeps. ddptrain's options of these names determine
    which checkpoints the folder keeps.
    """

    def __init__(
        self, store: ObjectStore, *, keep: int, keep_best: bool, events: EventLog, warn: Callable[[str], None]
    ) -> None:
        self._store, self._keep, self._keep_best = store, keep, keep_best
        self._events, self._warn = events, warn
        self._old: list[dict[str, Any]] = []  # checkpoints that are to be deleted, and are no longer in the index
        self._offered: queue.Queue[tuple[int, list[Path], float | None]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True, name="upload").start()

    def offer(self, step: int, paths: list[Path], accuracy: float | None) -> None:
        """Queue a complete checkpoint for upload. It is skipped if it has been deleted before its turn."""
        self._offered.put((step, paths, accuracy))

    def wait(self, stopping: Callable[[], bool]) -> int:
        """Wait until all checkpoints are in the store. Return CANNOT_WRITE if that takes too long, otherwise OK."""
        began = moved_at = shown_at = asked_at = time.monotonic()
        moved, state = self._store.num_parts, f"the last checkpoint is not in {self._store.url}"
        while self._offered.unfinished_tasks:
            time.sleep(0.05)
            now = time.monotonic()
            if self._store.num_parts > moved:
                moved, moved_at = self._store.num_parts, now
            asked_at = asked_at if stopping() else now
            if now - moved_at > STALL_S or now - asked_at > STOP_WAIT_S:
                self._warn(f"{state} after {now - began:.0f} s: run the same command again where its files are")
                return Exit.CANNOT_WRITE
            if now - shown_at > 5.0:
                self._warn(f"{state} yet: waiting for it")
                shown_at = now
        return Exit.OK

    def _run(self) -> None:
        while True:
            (step, paths, accuracy), pause = self._offered.get(), 1.0
            while True:
                try:
                    with contextlib.suppress(FileNotFoundError):  # it was deleted after newer ones were saved
                        self._copy(step, paths, accuracy)
                    break
                except (StoreError, OSError) as error:
                    self._warn(f"step {step} is not uploaded: {error}; the next try is in {pause:g} s")
                    self._events.emit("upload_failed", step=step, message=str(error))
                time.sleep(pause)
                pause = min(2 * pause, 60.0)
            self._offered.task_done()

    def _copy(self, step: int, paths: list[Path], accuracy: float | None) -> None:
        began, known = time.monotonic(), {entry["step"]: entry for entry in self._store.checkpoints()}
        if step not in known:
            files = [self._store.put(step, path) for path in paths]
            known[step] = {"step": step, "accuracy": accuracy, "files": files}
            kept = {*sorted(known, reverse=True)[: self._keep or None], self._keep_best and best_of(known.values())}
            self._store.write_index(entry for entry in known.values() if entry["step"] in kept)
            size, seconds = sum(file["bytes"] for file in files), time.monotonic() - began
            self._events.emit("checkpoint_uploaded", step=step, seconds=seconds, bytes=size, url=self._store.url)
            self._old += [known[old] for old in known.keys() - kept]
        while self._old:
            self._store.delete(self._old[0])
            del self._old[0]


def main(url: str, folder: Path, *, best: bool) -> int:
    """Fetch all checkpoints into a folder, or only the most accurate one. Return the exit code."""
    try:
        store = ObjectStore(url)
        folder.mkdir(parents=True, exist_ok=True)
        step = best_of(store.checkpoints()) if best else None
        for checkpoint in store.checkpoints():
            if step in (None, checkpoint["step"]):
                print(f"fetching step {checkpoint['step']} of {url} into {folder}", file=sys.stderr, flush=True)
                store.fetch(checkpoint, folder)
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return error.code if isinstance(error, StoreError) else Exit.CANNOT_WRITE
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), best="--best" in sys.argv))
