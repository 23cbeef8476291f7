"""Run parts of the nightly tests, and remember which ones have passed.

    python tests/nightly/run.py [PART | PATH ...]         these parts, or those that cover these paths; all without one
    python tests/nightly/run.py --changed --within S      the parts whose paths have changed since they last passed, as
                                                          far as they fit into S seconds

``parts.yaml`` lists the parts. A part that passes is recorded in ``verified.json``, with the git hashes of the paths
that it covers and the seconds that it took. With uncommitted changes in these paths nothing is recorded.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
VERIFIED = FOLDER / "verified.json"
TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the nightly tests: ``commands`` are arguments of Python, ``covers`` paths from the checkout's root."""

    name: str
    covers: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """When a part passed last: the hash of each path that it covers, and the seconds that it took."""

    trees: Mapping[str, str]
    seconds: float


def read_parts(text: str) -> list[Part]:
    """Return the parts of a ``parts.yaml``. The tests and benchmarks that a part runs are among the paths it covers."""
    parts = []
    for name, entry in yaml.safe_load(text).items():
        commands = [shlex.split(line) for line in entry["run"]]
        own = [command[1] if command[0] == "pytest" else command[0] for command in commands]
        commands = [["-m", *command] if command[0] == "pytest" else command for command in commands]
        covers = tuple(dict.fromkeys([*entry["covers"], *own]))
        parts.append(Part(name=name, covers=covers, commands=tuple(map(tuple, commands))))
    return parts


def read_verified(text: str) -> dict[str, Passed]:
    return {name: Passed(**entry) for name, entry in json.loads(text).items()}


def select(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, and those that cover these paths or a folder above or below them."""
    chosen = []
    for name in names:
        path = Path(name)
        hits = [part for part in parts if part.name == name] or [
            part
            for part in parts
            if any(path.is_relative_to(covered) or Path(covered).is_relative_to(path) for covered in part.covers)
        ]
        if not hits:
            sys.exit(f"no part is named {name} or covers it; the parts are {', '.join(part.name for part in parts)}")
        chosen += [part for part in hits if part not in chosen]
    return chosen


def plan(
    parts: Sequence[Part], verified: Mapping[str, Passed], trees: Mapping[str, str], within_s: float
) -> tuple[list[Part], list[tuple[Part, str]]]:
    """Return which parts to run, and which ones are left out, with the reason.

    A part runs if a path that it covers has changed since the part passed. The shortest ones come first, and those that
    no longer fit into ``within_s`` seconds are left out, as those that have never passed: their time is not known.
    """
    to_run, left_out = [], []
    changed = [part for part in parts if not is_valid(part, verified, trees)]
    for part in sorted(changed, key=lambda part: verified[part.name].seconds if part.name in verified else TIMEOUT_S):
        seconds = verified[part.name].seconds if part.name in verified else TIMEOUT_S
        if seconds <= within_s:
            to_run.append(part)
            within_s -= seconds
        else:
            known = f"it took {seconds:.0f} s" if part.name in verified else "it has never passed"
            left_out.append((part, f"{known}, {max(within_s, 0):.0f} s are left"))
    return to_run, left_out


def is_valid(part: Part, verified: Mapping[str, Passed], trees: Mapping[str, str]) -> bool:
    return part.name in verified and dict(verified[part.name].trees) == {path: trees[path] for path in part.covers}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def read_trees(parts: Sequence[Part]) -> dict[str, str]:
    """Return git's hash of each path that the parts cover: an empty one if the path is not in the last commit."""
    return {path: git("rev-parse", f"HEAD:{path}") for part in parts for path in part.covers}


def run_part(part: Part, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Run a part's commands one after the other. Return whether all have passed within ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    for command in part.commands:
        print(f"+ {part.name}: python {shlex.join(command)}", flush=True)
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, timeout=max(deadline - time.monotonic(), 1.0), check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{part.name}: not done after {timeout_s:.0f} s", flush=True)
            return False
        if done.returncode:
            return False
    return True


def record(part: Part, trees: Mapping[str, str], seconds: float) -> None:
    """Write that a part has passed, unless a path that it covers has changes that are not committed."""
    if changes := git("status", "--porcelain", "--", *part.covers):
        print(f"{part.name}: not recorded: not committed: {', '.join(line[3:] for line in changes.splitlines())}")
        return
    verified = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    verified[part.name] = {"trees": {path: trees[path] for path in part.covers}, "seconds": round(seconds)}
    VERIFIED.write_text(json.dumps(dict(sorted(verified.items())), indent=2) + "\n")


def main() -> int:
    """Return 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART | PATH")
    parser.add_argument("--changed", action="store_true", help="only parts whose paths have changed")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="seconds for all parts")
    options = parser.parse_args()
    parts = read_parts((FOLDER / "parts.yaml").read_text())
    trees = read_trees(parts)
    to_run = select(parts, options.names) if options.names else parts
    if options.changed:
        verified = read_verified(VERIFIED.read_text()) if VERIFIED.exists() else {}
        to_run, left_out = plan(to_run, verified, trees, options.within)
        for part, reason in left_out:
            print(f"nightly {part.name} is left out, although {', '.join(part.covers)} changed: {reason}", flush=True)
    failed = []
    for part in to_run:
        begin = time.monotonic()
        passed = run_part(part)
        seconds = time.monotonic() - begin
        print(f"nightly {part.name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s", flush=True)
        if passed:
            record(part, trees, seconds)
        else:
            failed.append(part.name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
