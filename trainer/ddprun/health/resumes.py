"""Compares what the ranks of an attempt resume from (ddprank/resume.py). It accuses only ranks that surely differ.

The steps at which the ranks begin decide, if they are known. Otherwise the files decide. Ranks may read different files
of one checkpoint: shards, or a file of each rank's random state. A rank that reads no file may get everything from
another rank.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ddpwire.machine import enumerate_ranges

MAX_NAMED = 4
NUMBER = re.compile(r"(\d+)")
ADVICE = "load on rank 0 and broadcast, or share the checkpoint folder (docs/script.md)"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a rank resumes from."""

    rank: int
    node: int
    local_rank: int
    is_known: bool = True  # False: the rank is executed, so it has no record
    # The step before its first one, as reported by the script and as counted by the optimizer; None: unknown. These may
    # differ, for example if gradients are accumulated.
    reported: int | None = None
    counted: int | None = None
    is_fresh: bool | None = None  # whether its optimizer had no state before that step
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # sizes and hashes; the size -1: missing

    @property
    def step(self) -> int | None:
        """The step before its first one, or None if it is unknown."""
        return self.counted if self.reported is None else self.reported

    @property
    def read(self) -> dict[str, tuple[int, str]]:
        """The files that exist."""
        return {name: file for name, file in self.files.items() if file[0] >= 0}

    @property
    def file(self) -> str:
        """The largest file that the rank has read, or an empty string."""
        return max(self.read, key=lambda name: self.read[name][0], default="")


def find_differences(resumes: Sequence[Resume]) -> list[list[Resume]]:
    """Return groups of ranks which differ from each other. The list is empty if no difference is certain."""
    groups: list[list[Resume]] = []
    if any(resume.read for resume in resumes):
        # A rank that has read files comes first: the others are compared with it.
        for resume in sorted(filter(lambda it: it.is_known, resumes), key=lambda it: (not it.read, it.rank)):
            same = next((group for group in groups if not _differ(group[0], resume)), None)
            if same:
                same.append(resume)
            else:
                groups.append([resume])
    return groups if len(groups) > 1 else []


def describe_differences(groups: Sequence[Sequence[Resume]], unknown: Sequence[int]) -> str:
    """Return a sentence about the groups, and about the ranks that were not observed."""
    texts = []
    for group in groups[:MAX_NAMED]:
        first, ranks = group[0], sorted(resume.rank for resume in group)
        step = "" if first.step is None else f" at step {first.step}"
        texts.append(f"rank{'s' * (len(ranks) > 1)} {enumerate_ranges(ranks)} from {first.file or 'no file'}{step}")
    more = f", and {len(groups) - MAX_NAMED} more" * (len(groups) > MAX_NAMED)
    more += f" (unknown: rank{'s' * (len(unknown) > 1)} {enumerate_ranges(unknown)})" if unknown else ""
    return f"the ranks resume from different checkpoints: {', '.join(texts)}{more}; {ADVICE}"


def _differ(first: Resume, other: Resume) -> bool:
    for step, its_step in ((first.reported, other.reported), (first.counted, other.counted)):
        if None not in (step, its_step):
            return step != its_step
    if not first.read or not other.read:
        is_missing = bool((first.read.keys() & other.files.keys()) or (other.read.keys() & first.files.keys()))
        return is_missing or (None not in (first.is_fresh, other.is_fresh) and first.is_fresh != other.is_fresh)
    return not _is_same_checkpoint(first, other)


def _is_same_checkpoint(first: Resume, other: Resume) -> bool:
    """Return whether two ranks, which may have read different files, can have read the same checkpoint."""
    largest = max(first.read.keys() & other.read.keys(), key=lambda name: first.read[name][0], default="")
    if largest and first.read[largest] != other.read[largest]:
        return False
    return any(_belong_together(first, first.file, other, name) for name in other.read) or any(
        _belong_together(first, name, other, other.file) for name in first.read
    )


def _belong_together(first: Resume, name: str, other: Resume, its_name: str) -> bool:
    """Return whether two files are in one folder, or have names that differ only in the ranks' own numbers."""
    parents = PurePosixPath(name).parent, PurePosixPath(its_name).parent
    if parents[0] == parents[1] != PurePosixPath():
        return True
    own = {(first.rank, other.rank), (first.node, other.node), (first.local_rank, other.local_rank)}
    parts, its_parts = NUMBER.split(name), NUMBER.split(its_name)
    return len(parts) == len(its_parts) and all(
        a == b or (a.isdecimal() and b.isdecimal() and (int(a), int(b)) in own)
        for a, b in zip(parts, its_parts, strict=True)
    )
