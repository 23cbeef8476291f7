"""Compares what the ranks of an attempt resume from (ddprank/resume.py). It accuses only ranks that surely differ.

Different files alone are no evidence, as ranks read shards, random states, or nothing: steps and optimizers decide.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpwire.machine import enumerate_ranges

MAX_NAMED = 4
NUMBER = re.compile(r"([0-9]+)")
ADVICE = "load on rank 0 and broadcast, or share the checkpoint folder (docs/script.md)"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a rank resumes from."""

    rank: int
    node: int
    local_rank: int
    is_known: bool = True  # False: the rank is executed, so it has no record
    # The steps before its first one, by the script and by the optimizer. They differ if gradients are accumulated.
    reported: int | None = None
    counted: int | None = None
    is_fresh: bool | None = None  # whether its optimizer had no state before that step, but has one after it
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # that it has read: their sizes and hashes

    @property
    def step(self) -> int | None:
        """The step before its first one, or None if it is unknown."""
        return self.counted if self.reported is None else self.reported

    @property
    def file(self) -> str:
        """The largest file that the rank has read, or an empty string."""
        return max(self.files, key=lambda name: self.files[name][0], default="")


def find_differences(resumes: Sequence[Resume]) -> list[list[Resume]]:
    """Return groups of ranks which differ from each other. The list is empty if no difference is certain."""
    groups: list[list[Resume]] = []
    if any(resume.files for resume in resumes):
        # A rank that has read files comes first: the others are compared with it.
        known = [resume for resume in resumes if resume.is_known]
        for resume in sorted(known, key=lambda resume: (not resume.files, resume.rank)):
            if same := next((group for group in groups if not _differ(group[0], resume)), None):
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
    if None not in (first.reported, other.reported):
        return first.reported != other.reported
    is_counted = None not in (first.counted, other.counted)
    if is_counted and first.counted == other.counted:
        return False
    if None not in (first.is_fresh, other.is_fresh) and first.is_fresh != other.is_fresh:
        return True
    # The parameters that only one rank has may have taken fewer steps (an expert), so counts alone are no evidence.
    return is_counted and _read_different_checkpoints(first, other)


def _read_different_checkpoints(first: Resume, other: Resume) -> bool:
    """Return whether the files of two ranks have one name but not one content, or names of different steps."""
    largest = max(first.files.keys() & other.files.keys(), key=lambda name: first.files[name][0], default="")
    if largest and first.files[largest] != other.files[largest]:
        return True
    own, its_own = first.files.keys() - other.files.keys(), other.files.keys() - first.files.keys()
    are_parts = {_are_parts(first, name, other, its_name) for name in own for its_name in its_own}
    return False in are_parts and True not in are_parts


def _are_parts(first: Resume, name: str, other: Resume, its_name: str) -> bool | None:
    """Return whether two names differ only in numbers of the ranks, or None if their texts differ."""
    parts, its_parts = NUMBER.split(name), NUMBER.split(its_name)
    if parts[::2] != its_parts[::2]:
        return None
    # The number of a rank, a node or a stage, from 0 or 1, is at most one more than the rank's or the node's.
    last, its_last = (max(resume.rank, resume.node) + 1 for resume in (first, other))
    pairs = zip(parts[1::2], its_parts[1::2], strict=True)
    return all(a == b or (int(a) <= last and int(b) <= its_last) for a, b in pairs)
