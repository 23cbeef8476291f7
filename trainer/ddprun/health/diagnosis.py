"""Collects data about what this node's ranks do, for ``ddpctl explain``. This happens on request, and after a hang.

ddpctl writes a unique word into ``diagnosis.request``. Then ddprun queries its ranks and writes ``diagnosis.json``,
which contains the same word. On the request ``profile SECONDS WORD``, ddprun profiles the ranks instead. Each query has
a timeout, because a rank that hangs or is stopped may not answer. A missing answer is reported as well.
"""

import base64
import contextlib
import gzip
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

from ddprun.ranks.rank_server import STACKS, STACKS_SIGNAL, ask
from ddprun.system import processes
from ddprun.system.file_writer import FileWriter, replace_file
from ddpwire import run_files
from ddpwire.run_files import DIAGNOSIS, DIAGNOSIS_REQUEST, RankProcess, rank_heartbeat, read_regular

RANKS = Path(__file__).parents[1] / "ranks"
NUM_SAMPLES = 5
SAMPLE_INTERVAL_S = 0.3  # a rank that works shows another stack by then
FLIGHT_TIMEOUT_S = 1.0  # a rank answers within milliseconds, unless another thread holds the GIL
MAX_TRACE_BYTES = 200_000_000
NO_SERVER = "it has not begun its first step, and has no process group, or was not forked by ddprun (--exec)"
MAX_COLLECTIVES, MAX_PROFILED_COLLECTIVES = 150, 2000  # the newest of each rank; torch keeps 2000
MAX_THREADS, MAX_FRAMES = 8, 24
MAX_CHILDREN = 6
PROFILE_REQUEST = re.compile(r"profile (\d{1,2}(?:\.\d{1,3})?) \w+")  # seconds
MAX_DIAGNOSIS_BYTES = 1_800_000  # ddpctl reads 2 MB of a file
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
Frame = tuple[str, int, str]  # file, line, function


class Diagnosis:
    """Collects data about what the ranks of the current attempt do."""

    def __init__(self, node_dir: Path, node: int, runtime: "os.PathLike[str]", files: FileWriter) -> None:
        self._node_dir, self._node, self._runtime, self._files = node_dir, node, runtime, files
        self._ranks: tuple[RankProcess, ...] = ()
        self._attempt = 1
        self._answered = ""
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError):  # create both files now: NFS caches that a file is missing
            for old in node_dir.glob(run_files.diagnosis_file("*")):
                old.unlink()
            (node_dir / DIAGNOSIS).touch()
            (node_dir / run_files.PROFILE).write_text("")
            (node_dir / DIAGNOSIS_REQUEST).write_text("")

    def track(self, ranks: tuple[RankProcess, ...], attempt: int) -> None:
        """From now on, collect data from these ranks, and answer requests in a thread."""
        self._ranks, self._attempt = ranks, attempt
        if not self._thread:
            self._thread = threading.Thread(target=self._answer_requests, name="diagnosis", daemon=True)
            self._thread.start()

    def _answer_requests(self) -> None:
        """If ddpctl has written a request, answer it. The disk and the ranks may take seconds to answer."""
        while True:
            time.sleep(1.5)
            data: bytes = self._files.read(read_regular, self._node_dir / DIAGNOSIS_REQUEST, unknown=b"")
            request = data.decode(errors="replace")[:64]
            if request and request != self._answered:
                self._answered = request
                if match := PROFILE_REQUEST.fullmatch(request):
                    self._profile(float(match[1]), request)
                else:
                    self._write(DIAGNOSIS, request)

    def keep(self) -> None:
        """Save the data of the current attempt. Call this before its ranks are killed."""
        self._write(run_files.diagnosis_file(self._attempt), num_samples=2)

    def _write(self, name: str, request: str = "", num_samples: int = NUM_SAMPLES) -> None:
        ranks = collect(self._ranks, Path(self._runtime), num_samples)
        facts = {"request": request, "node": self._node, "attempt": self._attempt, "time": time.time(), "ranks": ranks}
        data = json.dumps(facts).encode()
        for most in (20, 2, 0):  # with very many ranks, keep their current state and drop older data
            if len(data) > MAX_DIAGNOSIS_BYTES:
                for rank in ranks:
                    _shorten(rank, most)
                data = json.dumps(facts | {"shortened": True}).encode()
        self._files.submit(replace_file, self._node_dir / name, data)

    def _profile(self, seconds: float, request: str) -> None:
        """Profile all ranks at the same time. ddpctl recognizes the answer by ``request``, which is written last."""
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="profile-", dir=self._node_dir) as folder:

            def record(rank: RankProcess) -> dict[str, Any]:
                heartbeat = Path(self._runtime, rank_heartbeat(rank.rank))
                return {"rank": rank.rank} | profile_rank(heartbeat, Path(folder, f"{rank.rank}"), seconds)

            with ThreadPoolExecutor(len(self._ranks) or 1) as pool:
                profile = {"node": self._node, "ranks": list(pool.map(record, self._ranks)), "request": request}
            self._files.submit(replace_file, self._node_dir / run_files.PROFILE, json.dumps(profile).encode())


def collect(ranks: Sequence[RankProcess], runtime: Path, num_samples: int) -> list[dict[str, Any]]:
    """Return the data of each rank as JSON: process states and stacks at several moments, and its last collectives."""
    records: list[dict[str, Any]] = []
    for rank in ranks:
        record: dict[str, Any] = {"rank": rank.rank, "pid": rank.pid, "group_at": None, "samples": [], "children": []}
        with contextlib.suppress(OSError):
            group = runtime / f"{rank_heartbeat(rank.rank)}{run_files.GROUP_SUFFIX}"
            record["group_at"] = group.stat().st_mtime
        records.append(record)
    children = [processes.descendants(rank.pid)[:MAX_CHILDREN] for rank in ranks]
    for number in range(num_samples):
        time.sleep(SAMPLE_INTERVAL_S if number else 0)
        states = [_state(rank.pid) | {"links": read_links(Path(f"/proc/{rank.pid}"))} for rank in ranks]
        stacks = read_stacks([rank.pid for rank in ranks])
        for record, state, stack in zip(records, states, stacks, strict=True):
            record["samples"].append(state | {"time": time.time(), "threads": stack})
    # A rank and its children share one file: ask one child at a time.
    for place in range(max(map(len, children), default=0)):
        pairs = [(record, pids[place]) for record, pids in zip(records, children, strict=True) if place < len(pids)]
        states = [_state(pid) for _, pid in pairs]
        for (record, pid), state, stack in zip(pairs, states, read_stacks([pid for _, pid in pairs]), strict=True):
            record["children"].append({"pid": pid, "threads": stack} | state)
    for record, rank in zip(records, ranks, strict=True):
        record |= read_collectives(runtime / rank_heartbeat(rank.rank)) | {"time": time.time()}
    return records


def _shorten(rank: dict[str, Any], most: int) -> None:
    """Keep only a rank's last sample, at most ``most`` collectives and children, and some threads and frames."""
    rank["samples"], rank["children"] = rank["samples"][-1:], rank["children"][:most]
    rank["collectives"] = rank["collectives"][-most:] if most else []
    for process in (*rank["samples"], *rank["children"]):
        process["threads"] = process["threads"] and [frames[: most + 4] for frames in process["threads"][: most + 1]]


def _state(pid: int) -> dict[str, Any]:
    process = processes.read_process(pid)
    if process is None:
        return {}
    state: dict[str, Any] = {"name": process.name, "state": process.state, "ticks": process.ticks}
    with contextlib.suppress(OSError):
        switches = re.search(r"(?m)^voluntary\w+:\s(\d+)", Path(f"/proc/{pid}/task/{pid}/status").read_text())
        state["switches"] = int(switches[1]) if switches else 0  # how often the main thread has started to wait
        state["wchan"] = Path(f"/proc/{pid}/wchan").read_text()
    return state


def read_links(process: Path) -> list[list[Any]]:
    """Return a list for each TCP peer that a process has on another machine.

    A list contains the process's address, the peer's address, the unacknowledged bytes, and the retransmissions.
    """
    links: dict[tuple[str, str], list[int]] = {}
    with contextlib.suppress(OSError, ValueError):  # the process has ended, or this is not Linux
        own = {str(link.readlink()) for link in (process / "fd").iterdir()}
        for line in "".join(table.read_text() for table in (process / "net").glob("tcp*")).splitlines():
            fields = line.split()
            address, peer = (field.partition(":")[0] for field in fields[1:3])
            is_open = fields[3] in ("01", "02")  # established, or SYN_SENT
            if address != peer and is_open and f"socket:[{fields[9]}]" in own:
                link = links.setdefault((address, peer), [0, 0])
                if fields[5].startswith("01:"):  # retransmits; with another timer, the peer does not accept data
                    link[:] = link[0] + int(fields[4].partition(":")[0], 16), max(link[1], int(fields[6], 16))
    return [[*addresses, *link] for addresses, link in links.items()]


def read_stacks(pids: Sequence[int]) -> list[list[list[Frame]] | None]:
    """Return each process's stacks, or None if it did not answer. The main thread and innermost frames come first."""
    files = {pid: descriptor for pid in pids if (descriptor := _open_stacks(pid)) is not None}
    try:
        for pid, descriptor in files.items():
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):
                # Only the main thread: the signal may disturb other threads, which libraries have started.
                if processes.LIBC and hasattr(processes.LIBC, "tgkill"):
                    processes.LIBC.tgkill(pid, pid, int(STACKS_SIGNAL))
                else:
                    os.kill(pid, STACKS_SIGNAL)
        _wait_until_settled(files.values())
        texts = {pid: os.pread(descriptor, 1 << 18, 0) for pid, descriptor in files.items()}
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return [parse_stacks(texts[pid].decode(errors="replace")) if texts.get(pid) else None for pid in pids]


def _open_stacks(pid: int) -> int | None:
    """Open the memfd to which a process writes its stacks. Return None if this fails or the process is stopped."""
    with contextlib.suppress(OSError):
        if not processes.is_stopped(pid):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if str(link.readlink()).startswith(f"/memfd:{STACKS}"):
                    return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    return None


def _wait_until_settled(descriptors: Iterable[int]) -> None:
    """Wait until each file has a dump that has not grown for 0.1 s, because it has no end mark, but at most 1 s."""
    began = changed_at = time.monotonic()
    last: list[int] = []
    while time.monotonic() < began + 1.0:
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        if sizes != last:
            last, changed_at = sizes, time.monotonic()
        elif all(sizes) and time.monotonic() - changed_at > 0.1:
            return
        time.sleep(0.01)


def parse_stacks(text: str) -> list[list[Frame]]:
    """Return the threads in faulthandler's dump. The first one is the main thread, which handled the signal."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append((line.startswith("Current"), []))
        elif threads and (match := FRAME.fullmatch(line)):
            threads[-1][1].append((match[1], int(match[2]), match[3]))
    server, start = str(RANKS / "rank_server.py"), str(RANKS / "fork_server.py")
    kept = [thread for thread in threads if not any(file == server for file, _, _ in thread[1])]
    main_first = (frames for _, frames in sorted(kept, key=lambda thread: not thread[0]))
    # The frames below the first one of ``start`` belong to ddprun, which started the script.
    return [[*takewhile(lambda frame: frame[0] != start, frames)][:MAX_FRAMES] for frames in main_first][:MAX_THREADS]


def read_collectives(heartbeat: Path, limit: int = MAX_COLLECTIVES) -> dict[str, Any]:
    """Return a rank's last ``collectives`` from its flight recorder.

    If this fails, return the reason under the key ``unknown``.
    """
    try:
        recorders = ask(heartbeat, FLIGHT_TIMEOUT_S)
        unrecorded = recorders.pop("unrecorded")
        entries = [entry for recorder in recorders.values() for entry in recorder.get("entries", ())]
        collectives = sorted(map(_collective, entries), key=lambda collective: collective["at"])[-limit:]
        reason = f"this torch does not record the collectives of {', '.join(unrecorded)}"
        return {"collectives": collectives} | ({"unknown": reason} if unrecorded else {})
    except FileNotFoundError:
        reason = NO_SERVER
    except TimeoutError:
        reason = f"its flight recorder did not answer within {FLIGHT_TIMEOUT_S:g} s"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"its flight recorder cannot be read: {error}"
    return {"collectives": [], "unknown": reason}


def profile_rank(heartbeat: Path, trace: Path, seconds: float) -> dict[str, Any]:
    """Return a rank's profile (rank_server.py) and gzipped trace.

    If this fails, return the reason under the key ``unknown``.
    """
    try:
        profile = dict(ask(heartbeat, seconds + 30.0, trace=str(trace), seconds=seconds))
        if "unknown" in profile:
            return profile
        if trace.stat().st_size > MAX_TRACE_BYTES:
            return {"unknown": f"its trace has more than {MAX_TRACE_BYTES / 1e6:.0f} MB: choose fewer --seconds"}
        profile["collectives"] = read_collectives(heartbeat, MAX_PROFILED_COLLECTIVES)["collectives"]
        return profile | {"trace": base64.b64encode(gzip.compress(read_regular(trace), 3)).decode()}
    except (OSError, ValueError, TypeError) as error:
        return {"unknown": NO_SERVER if isinstance(error, FileNotFoundError) else f"it cannot be profiled: {error}"}


def _collective(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a flight recorder entry (format version 2.10) that are to be kept."""
    name, description = entry["process_group"]
    return {
        "group": f"{name}",
        "desc": str(description),
        "seq": int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
        "op": str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "p2p": bool(entry["is_p2p"]),
        "done": bool(entry["retired"]) or entry["state"] == "completed",  # gloo sets only retired
        "at": int(entry["time_created_ns"]) / 1e9,
    }
