"""The files in a run's folder: where each file is, and how the programs read and write the files that they share.

RUN/                       a Slurm array has a folder task-K/ for each task; .targets/ is in RUN's parent folder
  run.json                 ddpctl's record (only ddpctl reads and writes it)
  starts                   one line for each time that a batch script has started the run (read_starts)
  step                     the number of the Slurm step in which the nodes run
  store.secret             the secret with which the nodes sign the values in the run's store
  checkpoints/             the script's checkpoints; DDP_CHECKPOINT_DIR has this path
    .ddprun-copy.json      the files of the last checkpoint, if other nodes have copies (ddprun.files.checkpoint_copies)
  node-0/
    ddprun.lock            a file that the node's ddprun locks until it ends
    node.json              the node's state: pid, state, metrics address, ranks
    metrics.url            the address of its metrics alone, for shells
    node.log               all output of the node, each line with its node and rank
    events.jsonl           what happened, one event per line (ddpwire.events); events.1.jsonl: earlier events
    rank-1.log             what rank 1 wrote to stdout and stderr
    timed/rank-1.log       the same lines with their times; timed/rank-1.1.log: earlier lines
    timed/ddprun.log       ddprun's own lines with their times
    rank-1.error.json      the error that ended rank 1 in the current attempt; ddptrain and torch's @record write it
    history.csv            the node's metrics over time, one row every few seconds (ddpwire.history)
    environment.json       the node's machine and software versions
    summary.json           step, state and counters, written every few seconds, for the next start (files.node_dir)
    ddprun.lock.owner      the process that uses the folder, only if the file system has no locks (ddpwire.locks)
    diagnosis.request      a token that ddpctl writes; the answer contains the same token (ddprun.health.diagnosis)
    diagnosis.json         what the ranks did during the last ddpctl explain
    diagnosis-attempt-2.json   what the ranks did when one of them hung in attempt 2
    profile.json           what the ranks did during the last ddpctl profile (ddprun.profile)
    stacks-attempt-2.txt   the ranks' stacks when one of them hung in attempt 2
    metrics.prom           the last response of /metrics, in the format of node_exporter's textfile collector
    outcome.json           how the run ended; exists once ddprun has ended by itself

The live state of the ranks, such as their heartbeats, is in the node's own memory (ddprun.runtime_dir).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ddpwire import locks, names
from ddpwire.exits import Exit

CHECKPOINTS = "checkpoints"
COPY, COPY_PART = ".ddprun-copy.json", ".ddprun-copy.json.part"  # the files of a complete copy; of one in progress
STORE_SECRET = "store.secret"  # noqa: S105 -- a file's name
RECORD = "run.json"  # its "checkpoint_dir" is the folder of the checkpoints, which a resumed run shares
STARTS, STEP = "starts", "step"
LOCK = "ddprun.lock"
NODE = "node.json"
METRICS_URL = "metrics.url"
NODE_LOG = "node.log"
SUMMARY = "summary.json"
METRICS = "metrics"
SNAPSHOT = "metrics.prom"
HEARTBEAT = "heartbeat"
GROUP_SUFFIX = ".group"
OUTCOME = "outcome.json"
DIAGNOSIS, DIAGNOSIS_REQUEST, PROFILE = "diagnosis.json", "diagnosis.request", "profile.json"
MAX_BYTES = 1 << 27  # of a record
ENVIRONMENT = "environment.json"
PYTHON_RECORD = "ddpctl-environment.json"  # in the folder of a Python environment that ddpctl launch has made
State = Literal[  # of a node
    "starting",  # it makes its checks or, after the rendezvous, starts its ranks, for which it may import torch
    "rendezvous",
    "spare",  # it waits to take the place of a lost node
    "training",  # its ranks run; ddpctl shows "running" until a rank has reported a step
    "stopping",
    "succeeded",
    "failed",
]
TARGETS = ".targets"


# Functions of a number that return a path: of a node in its run's folder,
node_name = "node-{}".format
# of a rank in its node's folder,
rank_log = "rank-{}.log".format
rank_error = "rank-{}.error.json".format
# of an attempt in its node's folder (what the ranks did before they were killed, and their stacks after a hang),
diagnosis_file = "diagnosis-attempt-{}.json".format
stacks_file = "stacks-attempt-{}.txt".format
# and of a rank in its node's runtime folder (the files of prometheus_client, and the heartbeat).
rank_metrics = f"{METRICS}/rank-{{}}".format
rank_heartbeat = f"{HEARTBEAT}/rank-{{}}".format


def timed_log(rank: int | None) -> str:
    """Return the path of the log that shows the times of a rank's lines.

    If ``rank`` is None, it is the log of ddprun's own lines.
    """
    return f"timed/{'ddprun' if rank is None else f'rank-{rank}'}.log"


def append_bounded(path: Path, text: bytes, max_bytes: int) -> None:
    """Append lines to a file such as ``a.log``. If the file then exceeds ``max_bytes``, rename it to ``a.1.log``."""
    # O_NONBLOCK: if the path is a FIFO without a reader, opening it must not block the training.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, text)
        if os.fstat(descriptor).st_size > max_bytes:
            locks.lock(descriptor, path, wait_s=None)  # without locks, a line may be lost
            if path.stat().st_ino == os.fstat(descriptor).st_ino:  # no other process has replaced it meanwhile
                path.replace(path.with_name(f"{path.stem}.1{path.suffix}"))
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file so that a reader sees either the old content or all of ``data``, even after a crash.

    Write a temporary file in the same folder, sync and rename it, and sync the folder. Raises OSError. In that case, no
    temporary file is left. Without ``sync``, the content may be lost in a power failure.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync ``folder``, so that a rename inside it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_part(part: Path, target: Path, sha256: str, modified_ns: int) -> bool:
    """Give a fetched file its modification time and its final name, or delete it if its SHA-256 is wrong.

    Return whether it was right. Raises OSError, such as FileNotFoundError.
    """
    with open_regular(part) as data:
        is_whole = hashlib.file_digest(data, "sha256").hexdigest() == sha256
    if is_whole:
        os.utime(part, ns=(modified_ns, modified_ns))
        part.replace(target)
    else:
        part.unlink()
    return is_whole


# ---- Readers that open only regular files, because a FIFO in place of a file would block them.


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError if the file cannot be opened or is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()


def read_end(path: Path, max_bytes: int) -> str:
    """Return at most the last ``max_bytes`` bytes of a regular file as text. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def read_record(path: Path) -> bytes:
    """Return the content of a JSON file. Raises OSError if the file cannot be read or is larger than ``MAX_BYTES``."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if the text is not valid JSON or the value is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _write_json(path: Path, value: "NodeState | Outcome") -> None:
    write_atomic(path, (json.dumps(asdict(value), indent=1) + "\n").encode())


def _known(kind: "type[NodeState | Notice | RankProcess | Outcome]", values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of ``kind``. Another version may have written other values as well."""
    return {name: values[name] for name in kind.__dataclass_fields__ if name in values}


# ---- A rank's error file, in the format of torch.distributed.elastic's ``record``
# (https://docs.pytorch.org/docs/stable/elastic/errors.html). A script may use ``record`` itself.


def write_error(message: str, environ: Mapping[str, str]) -> None:
    """Write the error that ends this rank into the file that the launcher has named.

    Do nothing if the launcher has named no file. An empty message means that the rank called ``sys.exit``
    with a number. An empty message never replaces a message that the file already has.
    """
    path = environ.get(names.ERROR_FILE)
    if path and (message or not Path(path).exists()):
        info = {"py_callstack": "", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": info}}))


def read_error(path: Path) -> str | None:
    """Return the message in a rank's error file, or None if it cannot be read."""
    try:
        message = parse_json(read_record(path))["message"]
        return str(message if isinstance(message, str) else message["message"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


# ---- ``node.json``: a node's ddprun and its state. ddprun replaces the file at every change of state.


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank of the current attempt on this node."""

    rank: int  # global
    local_rank: int
    pid: int
    log: str  # the log's path, as the node sees it
    state: str = ""  # after the ranks were asked to end: "running", "stopped" (by SIGSTOP) or "ended"


NoticeEvent = Literal["succeeded", "failed", "restarted", "hang", "preempted", "lost_node"]
NOTICE_EVENTS: tuple[NoticeEvent, ...] = get_args(NoticeEvent)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice of the job's ``notify``, recorded before it is sent."""

    event: NoticeEvent
    attempt: int  # that has ended
    to: str  # the name of the variable with the address, after $, or a command
    state: Literal["sending", "sent", "failed"]  # "sending" of a node that has ended: whether it arrived is unknown
    why: str = ""  # it failed


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What a node reports about itself. It is current only while a process holds the lock on ddprun.lock."""

    run: str
    node: int
    pid: int  # of ddprun
    state: State
    started: float  # when ddprun started, in seconds since the epoch
    run_uid: str = ""  # distinguishes runs of the same name
    spare: int | None = None  # the number of this machine while it was a spare; None: it was none
    attempt: int = 1
    last_failure: str = ""  # why the previous attempt failed; empty: there was none, or this node did not take part
    resumed_apart: str = ""  # on node 0: which ranks of this attempt have resumed from different checkpoints
    metrics: str | None = None  # the URL to scrape; None: not served yet
    master: str | None = None  # host:port of the node's rendezvous; None: not known yet
    runtime: str = ""  # the folder with the live state of the ranks (ddprun.runtime_dir)
    ranks: tuple[RankProcess, ...] = ()
    notices: tuple[Notice, ...] = ()

    def write(self, node_dir: Path) -> None:
        """Write the state into a node's folder. Raises OSError."""
        write_atomic(node_dir / METRICS_URL, (self.metrics or "").encode())
        _write_json(node_dir / NODE, self)


def read_node(text: str) -> NodeState:
    """Return the state in ``text``, the content of a node.json. Raises ValueError. Ignore unknown keys."""
    try:
        known = _known(NodeState, parse_json(text))
        ranks = tuple(RankProcess(**_known(RankProcess, rank)) for rank in known.pop("ranks", ()))
        notices = tuple(Notice(**_known(Notice, notice)) for notice in known.pop("notices", ()))
        return NodeState(ranks=ranks, notices=notices, **known)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a node's state: {error}") from None


# ---- ``outcome.json``: how a run ended. It is the same on every node of a run.


Cause = Literal[
    "ok",  # every rank exited with 0
    "error",  # a rank exited with a code of its own
    "killed",  # a rank died of a signal that ddprun did not send
    "oom",  # a rank was killed because memory ran out
    "hang",  # a rank hung and was killed
    "stopped",  # a stop was requested, and the ranks ended with the exit code of that signal
    "node_lost",  # a node's ddprun is gone
    "gave_up",  # the ranks failed repeatedly without progress
    "absent",  # not all nodes joined in time
    "unavailable",  # an address or a port was not available
    "config",  # a node's variables are inconsistent, or contradict those of another node
    "setup",  # a command of node_setup failed on a node
    "internal",  # a bug in ddprun
]


# What gloo and monitored_barrier say after a collective's time-out, and NCCL's watchdog before it aborts the process.
COLLECTIVE_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms for |failed to pass monitoredBarrier|Watchdog caught collective operation timeout"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its success, or its first failure."""

    code: int  # ddpwire.exits; what ddprun exits with on every node
    cause: Cause
    message: str  # one line for a person
    node: int | None = None  # the node that failed; None: no single node
    rank: int | None = None  # global rank
    step: int | None = None  # the last step that the rank reported; None: it reported none
    retry: bool = False  # whether starting the same run again may help
    attempt: int = 1

    @property
    def has_diagnosis(self) -> bool:
        """Whether the nodes save what the other ranks do before they kill them: one has hung, or waited in vain."""
        is_timeout = COLLECTIVE_TIMEOUT.search(self.message) or self.code == 128 + signal.SIGABRT
        return self.cause == "hang" or bool(is_timeout)

    def write(self, node_dir: Path) -> None:
        """Write the outcome into a node's folder. Raises OSError."""
        _write_json(node_dir / OUTCOME, self)


def termination_message(outcome: Outcome) -> str:
    """Return the outcome as JSON, as the termination message of a container, of which Kubernetes keeps 4096 bytes."""
    while len((text := json.dumps(asdict(outcome), ensure_ascii=False)).encode()) > 4096:
        outcome = replace(outcome, message=outcome.message[: len(outcome.message) * 3 // 4])
    return text


def read_outcome(text: str) -> Outcome:
    """Return the outcome in ``text``, the content of an outcome.json. Raises ValueError. Ignore unknown keys."""
    try:
        return Outcome(**_known(Outcome, parse_json(text)))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not an outcome: {error}") from None


# The outcome of a node whose ddprun was killed on request and could not write an outcome.
KILLED_ON_REQUEST = Outcome(code=Exit.KILLED, cause="stopped", message="killed on request, without saving", retry=True)

# ---- ``starts``: each start of a run by Slurm, including the starts after Slurm has requeued the run.


@dataclass(frozen=True, kw_only=True)
class Start:
    """One line of the file ``starts``."""

    launcher: str  # the launcher that has this queue
    job: str  # the queue's name for the run
    requeues: int  # how often the run had been requeued
    limit: int  # how often the run may be requeued
    time: float  # when the queue started the run, in seconds since the epoch


def read_starts(text: str) -> tuple[Start, ...]:
    """Return the starts in ``text``, the content of the file ``starts``, in order. Skip incomplete lines."""
    lines = (line.split(" ") for line in text.splitlines())
    return tuple(
        Start(launcher=fields[0], job=fields[1], requeues=int(fields[2]), limit=int(fields[3]), time=float(fields[4]))
        for fields in lines
        if len(fields) == len(Start.__dataclass_fields__) and all(word.isdecimal() for word in fields[2:])
    )


# ---- Where Prometheus finds a run's metrics, in the format of its file_sd
# (https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config).
#
# The files are in the folder ``.targets``, in the parent folder of the runs' folders: one per run, or one per node if
# the nodes write them. A file exists until its run has ended.


@dataclass(frozen=True, kw_only=True)
class MetricsTarget:
    """A node's metrics endpoint, and the labels that Prometheus adds to all of its series."""

    url: str  # http://host:port/metrics
    job_id: str  # the run
    node: int
    launcher: str
    slurm_job: str | None = None  # the number of the Slurm job


def targets_file_name(run: str, node: int | None = None) -> str:
    """Return the name of the targets file of a run or, if ``node`` is given, of one of its nodes."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run)
    return f"{name}.json" if node is None else f"{name}.node-{node}.json"


def is_targets_file_of(name: str, run: str) -> bool:
    """Return whether a targets file belongs to this run, or to one of its tasks in a Slurm array."""
    stem = re.escape(targets_file_name(run)[:-5])
    return re.fullmatch(rf"{stem}(\.task-[0-9]+)?(\.node-[0-9]+)?\.json", name) is not None


def targets_text(targets: Iterable[MetricsTarget]) -> str:
    """Return the content of a targets file."""
    groups = []
    for target in targets:
        labels = {"job_id": target.job_id, "launcher": target.launcher, "node": str(target.node)}
        if target.slurm_job:
            labels["slurm_job"] = target.slurm_job
        groups.append({"targets": [urlsplit(target.url).netloc], "labels": labels})
    return json.dumps(groups, indent=1) + "\n"
