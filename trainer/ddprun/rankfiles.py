"""The files in which prometheus_client keeps what a rank counts, a set for each of its processes.

Counters of processes that have ended are kept, in one file, so that a scrape of a run that was started a hundred times
costs no more than that of any other. Gauges say how things stand, and nothing stands there: they are put aside, for the
run's last words alone.
"""

import contextlib
import struct
import threading
from pathlib import Path

PREFIX = "rank-"
KEPT = ("counter", "histogram", "summary")
ASIDE = ".last"
READING = threading.Lock()  # held by a scrape while it reads, and here while files are replaced


def put_gauges_aside(metrics_dir: Path, rank: int) -> None:
    """Let nobody scrape the gauges of a rank that has ended."""
    for path in (metrics_dir / f"{PREFIX}{rank}").glob("gauge_*.db"):
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(ASIDE))


def begin(folder: Path) -> None:
    """A rank is about to be started: its earlier processes have ended."""
    for path in folder.glob(f"*{ASIDE}"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError, RuntimeError, struct.error):  # a torn file: then there are many
        fold(folder)


def fold(folder: Path) -> None:
    """Make one file of each kind of those of processes that have ended. Raises what torn files make the library do."""
    from prometheus_client.mmap_dict import MmapedDict, mmap_key
    from prometheus_client.multiprocess import MultiProcessCollector

    for kind in KEPT:
        files = sorted(folder.glob(f"{kind}_*.db"))
        if len(files) < 2:
            continue
        merged = MultiProcessCollector.merge(map(str, files), accumulate=False)  # type: ignore[no-untyped-call]
        new = folder / f"{kind}.new"
        new.write_bytes(bytes(2 * max(file.stat().st_size for file in files)))  # a map of a hole kills on a full disk
        kept = MmapedDict(str(new))  # type: ignore[no-untyped-call]
        for metric in merged:
            for sample in metric.samples:
                key = mmap_key(
                    metric.name, sample.name, list(sample.labels), list(sample.labels.values()), metric.documentation
                )
                kept.write_value(key, sample.value, 0.0)  # type: ignore[no-untyped-call]
        kept.close()  # type: ignore[no-untyped-call]
        with READING:
            for file in files:
                file.unlink()
            new.rename(folder / f"{kind}_0.db")
