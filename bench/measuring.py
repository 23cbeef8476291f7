"""Functions that several benchmarks share: options, processes, turns, waiting, the machine, tables and results."""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Way = TypeVar("Way")
TABLE_END = "<!-- end -->\n"


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a benchmark."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def clean_environ(*prefixes: str) -> dict[str, str]:
    """Return this process's environment without variables that begin with PET_, DDP_ or one of ``prefixes``."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "DDP_", *prefixes))}


def start_python(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start Python with these arguments. The options are those of Popen."""
    return subprocess.Popen([sys.executable, *arguments], **options)


def runtime_files(run_dir: Path, pattern: str) -> list[Path]:
    """Return the files in the runtime folders of a run's nodes on this machine, such as ``heartbeat/rank-*``."""
    from ddpwire.run_files import NODE, read_node  # gpu.py imports this module where no package is installed

    paths: list[Path] = []
    for path in run_dir.glob(f"node-*/{NODE}"):
        with contextlib.suppress(OSError, ValueError):  # the node is starting
            runtime = read_node(path.read_text()).runtime
            paths += Path(runtime).glob(pattern) if runtime else ()
    return paths


def processes_with(variable: str, value: str) -> list[Any]:
    """Return the processes (of psutil) that have this variable in their environment, without those that have ended."""
    import psutil

    matching = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                matching.append(process)
    return matching


def memory_mib(field: str) -> float:
    """Return VmHWM (the peak) or VmRSS of this process in MiB, as in proc(5)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def reset_peak() -> None:
    """Let the peak of this process's memory (VmHWM) begin now."""
    Path("/proc/self/clear_refs").write_text("5")


def free_port() -> int:
    """Return a TCP port of the loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def in_turns(ways: Sequence[Way], num_rounds: int) -> Iterator[tuple[int, Way]]:
    """Yield each way once per round, with the number of the round. Every second round has the reversed order."""
    for number in range(num_rounds):
        for way in ways if number % 2 == 0 else ways[::-1]:
            yield number, way


def wait_until(condition: Callable[[], object], event: str, *, timeout_s: float, pause_s: float = 0.02) -> None:
    """Wait until ``condition()`` is true. End the benchmark if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{event}: did not happen within {timeout_s:g} s")
        time.sleep(pause_s)


def machine() -> str:
    """Return the cores, the version of torch, and the load of this machine."""
    version, load = metadata.version("torch"), os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({platform.machine()}), torch {version}, load {load:.1f}"


def head(title: str, width: int, cell: int) -> str:
    """Return the first line of a table whose lines are made by ``row``."""
    return f"{title:{width}}{'median':>{cell}}{'min':>{cell}}{'max':>{cell}}{'n':>4}"


def row(name: str, values: Sequence[float], width: int, form: str) -> str:
    """Return a line with a name and the median, minimum, maximum and number of the values.

    ``form`` is the format of a number."""
    cells = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{name:{width}}{''.join(cells)}{len(values):4}"


def ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of the ratios. Each ratio divides a value by the baseline of the same round."""
    return statistics.median(value / reference for value, reference in zip(values, baseline, strict=True))


def write_json(path: Path | None, result: object) -> None:
    """Write the result of a benchmark, if a path is given."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def write_table(page: Path, script: str, text: str) -> None:
    """Replace the table that an earlier ``bench/SCRIPT --write`` has written into a page."""
    begin = f"<!-- made by bench/{script} --write -->\n"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{TABLE_END}{rest.partition(TABLE_END)[2]}")
