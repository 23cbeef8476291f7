"""Whom the kernel shall kill for memory, and whether it did: the counter of the memory cgroup in which the ranks live.

cgroup v2 has it in memory.events, v1 in memory.oom_control; both also count what a machine without limits kills.
"""

import contextlib
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
RANKS_FIRST = 500  # of 1000, the whole of the memory (proc(5), oom_score_adj)


class Memory:
    """The count of kills, and whether it has risen."""

    def __init__(self, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> None:
        self._folder = folder(root, own)
        self._kills = self._read()

    def killed(self) -> bool:
        """Whether somebody was killed since the last time that this said so."""
        before, self._kills = self._kills, self._read()
        return self._kills > before

    def limit(self) -> str:
        """How much there is, for a person."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(self._folder / name) if self._folder else ""
            if text.isdecimal() and int(text) < 1 << 60:  # v1's word for no limit is a little below 2^63
                return f"its cgroup has {int(text) / (1 << 30):.3g} GiB"
        return "the machine had no more"

    def _read(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            for line in (_text(self._folder / name) if self._folder else "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdecimal():
                    return int(value)
        return 0


def prefer(pid: int) -> None:
    """Let the kernel rather kill a rank, and what it starts from now on, than its ddprun, which holds torch as well."""
    own = _text(Path("/proc/self/oom_score_adj"))
    with contextlib.suppress(OSError, ValueError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(1000, int(own) + RANKS_FIRST)))


def folder(root: Path, own: Path) -> Path | None:
    """The memory cgroup of this process; None where there is none. A container sees its own as the root."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        mount = root if not controllers else root / "memory" if controllers == "memory" else None
        for place in (mount / path.lstrip("/"), mount) if mount else ():
            if any((place / name).exists() for name in ("memory.events", "memory.oom_control")):
                return place
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
