"""The node's history.csv (ddpwire.history): what its series were, kept while it runs. It knows nothing of ranks.

A row costs as much as a scrape, in a thread of ddprun's; no rank waits for it. A disk that is full stops no training.
"""

import contextlib
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from ddpwire.folder import write_atomic
from ddpwire.history import HEADER, HISTORY, MAX_ROWS, fold, line

EVERY_S = 1.0  # at first; twice that whenever the rows are thinned
IDLE = 50  # times what a row takes, at the least: of many ranks they come less often


class History:
    """Rows of a registry, one every few seconds and one whenever it is asked for."""

    def __init__(self, node_dir: Path, registry: CollectorRegistry) -> None:
        self._path = node_dir / HISTORY
        self._registry = registry
        self._lock = threading.Lock()
        self._every_s = EVERY_S
        self._rows = self._earlier()

    def start(self) -> None:
        """Keep rows from now on, until the process ends."""
        threading.Thread(target=self._run, name="history", daemon=True).start()

    def keep(self) -> None:
        """Keep a row of this moment."""
        samples = (
            (sample.name, sample.labels, sample.value)
            for family in self._registry.collect()
            for sample in family.samples
        )
        row = line(time.time(), fold(samples))
        with self._lock, contextlib.suppress(OSError):
            if len(self._rows) >= MAX_ROWS:
                self._thin()
            self._rows.append(row)
            with self._path.open("a") as file:
                file.write(f"{row}\n")

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            self.keep()
            time.sleep(max(self._every_s, IDLE * (time.monotonic() - began)))

    def _thin(self) -> None:
        """Every other row goes, and the next ones come half as often."""
        self._rows = self._rows[1::2]
        self._every_s *= 2
        self._write()

    def _earlier(self) -> list[str]:
        """What an earlier ddprun of this node wrote, if its columns are ours; else the file is begun anew."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            header, *rows = self._path.read_text().splitlines() or [""]
            if header == HEADER:
                whole = [row for row in rows if row.count(",") == header.count(",")]
                self._every_s = EVERY_S * max(1.0, _span_s(whole) / MAX_ROWS)
                self._rows = whole
                self._write()  # without a torn last line
                return whole
        self._rows = []
        with contextlib.suppress(OSError):
            self._write()
        return []

    def _write(self) -> None:
        write_atomic(self._path, "\n".join([HEADER, *self._rows, ""]).encode())


def _span_s(rows: list[str]) -> float:
    try:
        return float(rows[-1].partition(",")[0]) - float(rows[0].partition(",")[0]) if rows else 0.0
    except ValueError:
        return 0.0
