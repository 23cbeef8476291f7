"""Copies of node 0's checkpoint folder on other nodes, for a run whose nodes do not share that folder.

When a rank of node 0 has saved a checkpoint (the event ``checkpoint_saved``), node 0 lists the folder's files in a
manifest. Node 0 writes the manifest's size and SHA-256, a port and a nonce into the run's store, where values are
signed. From this port, the other nodes request the manifest and the files that they lack. Each request names one of
them by its SHA-256. The request also contains an HMAC of the nonce and the SHA-256, whose key is the run's secret. The
content is not encrypted.

A node saves the manifest and each file as ``.NAME.part``. When all of them are verified, the node renames the manifest
and then the files. If the node is killed before the last file is renamed, ``finish_copy`` renames the remaining files
when ddprun starts again. Files that are only in the previous manifest are deleted. A failed copy does not end the
training.

Before the ranks of an attempt start, node 0 announces its files anew, and a node that keeps copies waits for them: a
script may load the files on each node.

A spare that becomes node 0 (nodes/election.py) has no checkpoints. So each node that has a complete copy offers it in
the store of the new node 0, which fetches the newest one before its ranks start.
"""

import contextlib
import errno
import hashlib
import hmac
import io
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from ddprun.files.node_dir import EVENTS_TAIL_BYTES, Node
from ddprun.output.progress import Progress
from ddprun.system import network, stores
from ddprun.system.errors import NodeError, config_error, node_error
from ddpwire import names
from ddpwire.events import Event, read_last_events
from ddpwire.exits import Exit
from ddpwire.run_files import COPY, COPY_PART, open_regular, publish_part, read_regular, sync_folder, write_atomic

BYTES_PER_S = 50e6  # the limit for all copies together while ranks train
POLL_S, RETRY_S, FILL_POLL_S = 1.0, 5.0, 0.05  # looks at the store; after an error; while ranks wait for their copy
SILENT_S = 2.0  # a longer wait is logged
FILL_S = 60.0  # how long the ranks of a node wait for its copy
TIMEOUT_S = 30.0  # of a node that neither sends nor reads
CHUNK_BYTES = 1 << 20
PROOF = "DDP-Proof"  # a header
Members = Callable[[], tuple[int, ...]]  # returns the nodes of the current attempt
# Keys of the store. DUE and an attempt: the manifest that a node needs before its ranks start.
ANNOUNCED, LAST, DONE, HELD, DUE = "copies", "copies/last", "copies/done/", "copies/held/", "copies/due/"


class File(NamedTuple):
    """A file of a checkpoint folder. ``path`` is relative to the folder."""

    path: str
    size: int
    modified_ns: int
    sha256: str


class Manifest(NamedTuple):
    """The files of a checkpoint folder, sorted from old to new, and the step of the newest checkpoint if known.

    ``run`` is the run's id, or empty if it is unknown.
    """

    step: int | None = None
    files: tuple[File, ...] = ()
    run: str = ""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the file ``path``.

    The manifest is empty if the file is missing or invalid, or if it names a file that is hidden or outside the folder.
    """
    try:
        values = json.loads(read_regular(path))
        files = tuple(File(str(name), int(size), int(at), str(sha)) for name, size, at, sha in values["files"])
        safe = all(file.path and all(part[0] not in "./" for part in PurePosixPath(file.path).parts) for file in files)
        safe = safe and not any(part_path(Path(), file.path).name == COPY_PART for file in files)
        return Manifest(values["step"], files, str(values.get("run", ""))) if safe else Manifest()
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Manifest()


def scan(folder: Path, step: int | None, known: Manifest) -> Manifest:
    """Return the manifest of the files in a folder, except hidden files. Raises OSError if a file cannot be read.

    If a file has not changed since the manifest ``known`` was made, its hash is taken from that manifest.
    """
    hashes = {file[:3]: file.sha256 for file in known.files}
    files = []
    for parent, folders, entries in os.walk(folder, onerror=_raise_unless_gone):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in entries if not name.startswith(".")):
            try:
                with open_regular(path) as data:
                    info = os.fstat(data.fileno())
                    key = (str(path.relative_to(folder)), info.st_size, info.st_mtime_ns)
                    files.append(File(*key, hashes.get(key) or hashlib.file_digest(data, "sha256").hexdigest()))
            except OSError as error:
                _raise_unless_gone(error)
    return Manifest(step, tuple(sorted(files, key=lambda file: (file.modified_ns, file.path))))


def _raise_unless_gone(error: OSError) -> None:
    """Raise the error, except if it means that the path does not exist or is not a regular file."""
    if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.ENXIO):
        raise error


def part_path(folder: Path, path: str) -> Path:
    """Return the path that a file has until all files of its checkpoint are complete."""
    return (folder / path).with_name(f".{Path(path).name.lstrip('.')}.part")


def finish_copy(folder: Path) -> None:
    """Rename the files of a copy whose manifest is in place. Delete the files of an incomplete copy. Raises OSError."""
    for file in read_manifest(folder / COPY).files:
        with contextlib.suppress(FileNotFoundError):
            publish_part(part_path(folder, file.path), folder / file.path, file.sha256, file.modified_ns)
    for path in (*(file.path for file in read_manifest(folder / COPY_PART).files), COPY):
        part_path(folder, path).unlink(missing_ok=True)


class CheckpointCopies:
    """Threads that copy checkpoints: node 0 sends them, and the other nodes fetch them, until the store ends."""

    def __init__(self, node: Node, address: str, store: Any, members: Members, offers_at: str, is_new: bool) -> None:
        """Start the threads. Raises OSError and StoreError.

        ``offers_at``: the address of this node if it offers its copy to a new node 0. ``is_new``: whether this is a new
        node 0, which announces nothing before it has called ``restore``.

        ``address``: the address of node 0. ``members`` returns the nodes of the current attempt. Of these nodes, those
        with the lowest numbers after node 0 keep copies.
        """
        config = node.config
        self._folder, self._node, self._address = Path(config.checkpoint_dir or ""), config.node_rank, address
        self._secret, self._run_id, self._node_dir = config.secret, config.run_id, node.folder.path
        self._store, self._journal, self._reported = store.clone(), node.journal, ""
        self._members = members
        self._holders: Callable[[], list[int]] = lambda: sorted(members())[1 : config.checkpoint_copies]
        self._number = 0  # of the last manifest that this node 0 has announced, or that this other node has copied
        self._manifest = read_manifest(self._folder / COPY)
        self._nonce, self._saved = secrets.token_hex(32), cast(Event | None, None)
        self._content: dict[str, Path | bytes] = {}  # what node 0 sends, by SHA-256
        self._is_complete = not is_new
        self._pacing, self._ranks_ended, self._wake = threading.Lock(), threading.Event(), threading.Event()
        self._writing, self._is_closed = threading.Lock(), False
        self._attempt = self._announced_for = 0  # the attempts whose ranks start, and for which node 0 has announced
        if self._node:
            # On another host, a previous node with this number may have had a copy.
            self._store.set(f"{DONE}{self._node}", "0")
            if offers_at and self._manifest.files:
                self._offer(offers_at)
        else:
            self._port = network.serve_http(address, 0, self._send, name="copies", timeout_s=TIMEOUT_S)
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def finish(self, *, succeeded: bool) -> None:
        """Wait a limited time until the last checkpoint is copied. Call this after the ranks have ended."""
        self._ranks_ended.set()
        self._wake.set()
        limit_s = 60.0 if succeeded else 4.0  # less than ddpctl stop waits
        self._thread.join(SILENT_S)
        if self._thread.is_alive():
            self._journal.log(f"waiting for the copy of the last checkpoint, for at most {limit_s:g} s")
            self._thread.join(limit_s - SILENT_S)
        if self._thread.is_alive() and not self._node:
            self._failed(OSError(f"the last copy took longer than {limit_s:g} s"))

    def fill(self, attempt: int, gives_up: Callable[[], bool]) -> None:
        """Wait for the copy that the ranks of this node may load in this attempt. Call this before they start.

        A new node 0 first fetches the newest copy that another node offers. Raises NodeError and StoreError.
        """
        if not self._is_complete:
            self.restore()
        self._attempt = attempt
        self._wake.set()
        progress, deadline, due = Progress(self._journal.log, "waiting for the copy"), time.monotonic() + FILL_S, -1
        with contextlib.suppress(stores.StoreError):  # the consensus notices, too, that node 0 is lost
            while self._node in self._holders() and not 0 <= due <= self._number and not gives_up():
                if due < 0 <= (due := self._read(f"{DUE}{attempt}")):
                    self._wake.set()
                if time.monotonic() > deadline:
                    self._journal.log(f"warning: the ranks start without a copy, which was not here in {FILL_S:g} s")
                    return
                progress.update()
                time.sleep(FILL_POLL_S)

    def close(self) -> None:
        """Write nothing into the folder any more, because node 0 was lost."""
        with self._writing:
            self._is_closed = True

    @contextlib.contextmanager
    def _writes(self) -> Iterator[None]:
        with self._writing:
            if self._is_closed:
                raise OSError("node 0 was lost")
            yield

    def _offer(self, address: str) -> None:
        text = read_regular(self._folder / COPY)
        name, step = hashlib.sha256(text).hexdigest(), self._manifest.step
        self._content = {file.sha256: self._folder / file.path for file in self._manifest.files} | {name: text}
        port = network.serve_http(address, 0, self._send, name="copies", timeout_s=TIMEOUT_S)
        place = {"address": address, "port": port, "nonce": self._nonce, "size": len(text), "sha256": name}
        self._store.set(f"{HELD}{self._node}", json.dumps(place | {"step": step, "run": self._manifest.run}))

    def restore(self) -> None:
        """On a new node 0, fetch the newest copy that another node offers. Raises NodeError and StoreError.

        A copy of this run counts as newer than those of other runs. If a copy cannot be fetched, try the next one.
        """
        keys = [f"{HELD}{node}" for node in self._members() if node]
        offers = [stores.decode(key, self._store.get(key), dict) for key in keys if self._store.check([key])]
        own = read_manifest(self._folder / COPY)
        own_age = (own.run == self._run_id, -1 if own.step is None else own.step) if own.files else (False, -1)

        def age(offer: dict[str, Any]) -> tuple[bool, int]:
            return offer.get("run") == self._run_id, offer["step"] or 0

        failed: Exception | None = None
        for offer in sorted((offer for offer in offers if age(offer) > own_age), key=age, reverse=True):
            where = f"the checkpoint of step {offer['step']} from {offer['address']}"
            self._journal.log(f"this new node 0 fetches {where}")
            try:
                self._fetch_all(offer, offer["address"])
            except (OSError, HTTPException) as error:
                failed, message = error, f"{where} could not be fetched: {error}"
                self._journal.log(f"warning: {message}")
                continue
            break
        else:
            if failed and not own_age[0]:
                raise node_error(Exit.UNAVAILABLE, "unavailable", message, node=0)
            which = f"its own checkpoint of step {own.step}" if own.files else "no copied checkpoint"
            self._journal.log(f"this new node 0 uses {which}")
        self._is_complete = True

    def _run(self) -> None:
        with contextlib.suppress(stores.StoreError):
            while not self._is_closed:
                pause_s, is_last = POLL_S, self._ranks_ended.is_set()
                try:
                    if self._node:
                        self._copy()
                    elif self._is_complete:
                        self._announce(self._attempt, is_last=is_last)
                    if is_last and self._is_finished():
                        return
                except (OSError, HTTPException, NodeError) as error:
                    self._failed(error)
                    pause_s = RETRY_S
                self._wake.wait(FILL_POLL_S if self._ranks_ended.is_set() else pause_s)
                self._wake.clear()

    def _is_finished(self) -> bool:
        if self._node:
            return self._node not in self._holders() or 0 <= self._read(LAST) <= self._number
        return all(self._read(f"{DONE}{node}") >= self._number for node in self._holders())

    def _read(self, key: str) -> int:
        return stores.decode(key, self._store.get(key), int) if self._store.check([key]) else -1

    def _failed(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        if reason != self._reported:
            self._reported = reason
            self._journal.log(f"warning: a checkpoint was not copied: {reason}; the training is not affected")
            self._journal.emit("checkpoint_failed", message=f"it was not copied: {reason}")

    def proof(self, nonce: str, sha256: str) -> str:
        """Return the HMAC with which a node proves that it has the run's secret when it requests a file."""
        text = "\0".join(("checkpoint copy", self._run_id, nonce, sha256))
        return hmac.new(self._secret, text.encode(errors="surrogateescape"), "sha256").hexdigest()

    def _announce(self, attempt: int, *, is_last: bool) -> None:
        """On node 0, announce a manifest in the store for each attempt, and again after each saved checkpoint.

        Also announce a new manifest if a file is missing and another node has not fetched all files.
        """
        events, known = read_last_events(self._node_dir, EVENTS_TAIL_BYTES), self._manifest
        saved = next((event for event in reversed(events) if event.event == "checkpoint_saved"), None)
        is_whole = all((self._folder / file.path).exists() for file in known.files)
        is_behind = any(self._read(f"{DONE}{node}") < self._number for node in self._holders())
        if (
            is_last
            or attempt != self._announced_for
            or not self._content
            or saved != self._saved
            or (is_behind and not is_whole)
        ):
            manifest = scan(self._folder, saved.step if saved else known.step, known)
            manifest = manifest._replace(run=self._run_id)
            if manifest.files and (manifest != known or not self._content):
                self._manifest, self._number = manifest, self._number + 1
                # The indentation puts the step on its own line, which ddpctl reads with a shell command.
                text = f"{json.dumps(manifest._asdict(), indent=1)}\n".encode()
                write_atomic(self._folder / COPY, text)
                sha256 = hashlib.sha256(text).hexdigest()
                paths = {file.sha256: self._folder / file.path for file in manifest.files}
                # Manifests are sent from memory: a node may still fetch the previous one, whose file is replaced.
                manifests = [name for name, content in self._content.items() if isinstance(content, bytes)]
                self._content = paths | {name: self._content[name] for name in manifests[-1:]} | {sha256: text}
                place = {"number": self._number, "port": self._port, "nonce": self._nonce}
                self._store.set(ANNOUNCED, json.dumps(place | {"size": len(text), "sha256": sha256}))
            self._saved = saved
        if attempt != self._announced_for:
            self._store.set(f"{DUE}{attempt}", str(self._number))
            self._announced_for = attempt
        if is_last:
            self._store.set(LAST, str(self._number))

    def _send(self, request: BaseHTTPRequestHandler) -> None:
        sha256, proof = request.path[1:], request.headers.get(PROOF, "")
        content = self._content.get(sha256)
        if content is None or not hmac.compare_digest(proof, self.proof(self._nonce, sha256)):
            request.send_error(HTTPStatus.NOT_FOUND)
            return
        with io.BytesIO(content) if isinstance(content, bytes) else open_regular(content) as data:
            request.send_response(HTTPStatus.OK)
            request.end_headers()
            while chunk := data.read(CHUNK_BYTES):
                with self._pacing:  # limits the rate of all requests together
                    self._ranks_ended.wait(len(chunk) / BYTES_PER_S)
                request.wfile.write(chunk)

    def _copy(self) -> None:
        """Fetch the newest checkpoint from node 0 if this node keeps copies. If this fails, the previous copy stays."""
        if self._node not in self._holders() or not self._store.check([ANNOUNCED]):
            return
        place = stores.decode(ANNOUNCED, self._store.get(ANNOUNCED), dict)
        if place["number"] == self._number:
            return
        self._fetch_all(place, self._address)
        self._number, self._reported = place["number"], ""
        self._store.set(f"{DONE}{self._node}", str(self._number))

    def _fetch_all(self, place: dict[str, Any], address: str) -> None:
        began, folder = time.monotonic(), self._folder
        fetch = partial(self._fetch, address=address, port=place["port"], nonce=place["nonce"])
        with self._writes():
            folder.mkdir(parents=True, exist_ok=True)
            finish_copy(folder)
        fetch(File(COPY, place["size"], time.time_ns(), place["sha256"]))
        manifest, previous = read_manifest(folder / COPY_PART), read_manifest(folder / COPY)
        here = set(scan(folder, None, previous).files)
        lacking = [file for file in manifest.files if file not in here]
        for file in lacking:
            fetch(file)
        with self._writes():
            (folder / COPY_PART).replace(folder / COPY)
            sync_folder(folder)
            for path in {file.path for file in previous.files} - {file.path for file in manifest.files}:
                (folder / path).unlink(missing_ok=True)  # before the renames, because a folder may have become a file
                for parent in Path(path).parents[:-1]:
                    with contextlib.suppress(OSError):
                        (folder / parent).rmdir()
            for file in lacking:
                part_path(folder, file.path).replace(folder / file.path)
        seconds, num_bytes = time.monotonic() - began, sum(file.size for file in lacking)
        self._journal.emit("checkpoint_copied", step=manifest.step, seconds=seconds, bytes=num_bytes)

    def _fetch(self, file: File, *, address: str, port: int, nonce: str) -> None:
        """Fetch a file from another node, save it as ``.NAME.part``, and verify its SHA-256."""
        part, digest = part_path(self._folder, file.path), hashlib.sha256()
        with contextlib.closing(HTTPConnection(address, port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", f"/{file.sha256}", headers={PROOF: self.proof(nonce, file.sha256)})
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise OSError(f"{address} answers {answer.status} for {file.path}")
            with self._writes():
                part.parent.mkdir(parents=True, exist_ok=True)
                part.unlink(missing_ok=True)
                data = part.open("xb")  # O_EXCL does not follow links
            with data:
                while chunk := answer.read(min(CHUNK_BYTES, file.size - data.tell())):
                    with self._writes():
                        data.write(chunk)
                    digest.update(chunk)
                data.flush()
                os.fsync(data.fileno())
        if digest.hexdigest() != file.sha256:
            raise OSError(f"the content of {file.path} has another SHA-256 than {address} announced")
        os.utime(part, ns=(file.modified_ns, file.modified_ns))


def start_copies(
    node: Node, address: str, store: Any, members: Members, *, offers_at: str = "", is_new: bool = False
) -> CheckpointCopies | None:
    """Complete an interrupted copy. Then start and return CheckpointCopies, or return None if nothing is to be copied.

    The arguments are those of CheckpointCopies. Raises NodeError.
    """
    config = node.config
    folder, is_copied = Path(config.checkpoint_dir or ""), config.checkpoint_copies > 1 and config.max_nodes > 1
    if is_copied and not (config.checkpoint_dir and config.secret):
        raise config_error(f"--checkpoint-copies needs {names.CHECKPOINT_DIR} and {names.SECRET_FILE}")
    if not config.checkpoint_dir or (config.node_rank and not is_copied):
        return None
    try:
        finish_copy(folder)
        if is_copied:
            return CheckpointCopies(node, address, store, members, offers_at, is_new)
        (folder / COPY).unlink(missing_ok=True)  # without copies, the manifest of an earlier run is not updated
    except OSError as error:
        message = f"the checkpoints cannot be copied: {error.filename or folder}: {error.strerror}"
        raise node_error(Exit.CANNOT_WRITE, "unavailable", message) from None
    return None
