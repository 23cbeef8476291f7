"""Checks that compare a node with the others: builds, which must be the same, and speeds."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from statistics import median

from ddpcheck.finding import Finding, Status

SLOW, VERY_SLOW = 0.8, 0.5  # of the others' median
FEW = 3  # with fewer nodes it is not known which of them is right
SHORT = 12  # characters of a sha256


def compare_builds(check: str, builds: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield one finding per node: bad if a value differs from the most frequent one (or the first of several).

    For a driver, only the branch (570 of 570.86.15) must be the same. A different patch version is a warning.
    """
    keys = dict.fromkeys(key for build in builds.values() for key in build)
    usual = {key: Counter(build.get(key, "none") for build in builds.values()).most_common(1)[0][0] for key in keys}
    unsure = " (of two nodes it is not known which is right)" if len(builds) < FEW else ""
    for node, build in builds.items():
        other = {key: build.get(key, "none") for key in keys if build.get(key, "none") != usual[key]}
        patch = other.keys() == {"driver"} and other["driver"].split(".")[0] == usual["driver"].split(".")[0]
        said = [f"{key} {_short(value)}, elsewhere {_short(usual[key])}" for key, value in other.items()]
        said = said or [f"{key} {value}" for key, value in build.items() if len(value) < 64]
        value = ", ".join(said) + (unsure if other else "")
        yield Finding(check, "ok" if not other else "warning" if patch else "bad", value, node)


def _short(value: str) -> str:
    return value[:SHORT] if len(value) == 64 else value


def compare_speed(
    check: str, speeds: Mapping[int, float], unit: str, *, loaded: Collection[int] = ()
) -> Iterator[Finding]:
    """Yield one finding per node: below 80 % of the others' median is a warning, below 50 % bad.

    It is never more than a warning if other programs used the cores meanwhile (``loaded``), or if there are fewer than
    three nodes, because then the faster node may be the unusual one.
    """
    for node, speed in speeds.items():
        usual = median([other for number, other in speeds.items() if number != node] or [speed])
        ratio = speed / usual if usual else 1.0
        sure = len(speeds) >= FEW and node not in loaded
        status: Status = "ok" if ratio >= SLOW else "bad" if ratio < VERY_SLOW and sure else "warning"
        slow = f", {100 * (1 - ratio):.0f} % slower than the others" if status != "ok" else ""
        busy = ", beside other programs" if slow and node in loaded else ""
        yield Finding(check, status, f"{speed:.3g} {unit}{slow}{busy}", node)
