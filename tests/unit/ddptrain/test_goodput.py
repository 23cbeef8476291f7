"""Goodput: what a training reports at its end of the time of all ranks, over all of their starts."""

import re
from pathlib import Path

from tests import forks
from tests.ranks import World, _environs

EARLIER = """
from prometheus_client import Counter
Counter("ddp_unproductive_seconds", "Lost.", ("cause",)).labels(cause="recompute").inc(100_000)
"""
TRAINING = ("--data=synthetic", "--synthetic-samples=8", "--batch-size=4", "--epochs=1", "--device=cpu")


def test_the_report_at_the_end_counts_all_ranks_and_all_of_their_starts(tmp_path: Path) -> None:
    """An earlier start of rank 1 has lost 100,000 s, which is 50,000 s per rank."""
    environs = [environ | {"PROMETHEUS_MULTIPROC_DIR": environ["RANK"]} for environ in _environs(2, 2, {})]
    for environ in environs:
        (tmp_path / environ["RANK"]).mkdir()
    assert forks.run(["-c", EARLIER], cwd=tmp_path, env=environs[1], text=True, timeout=60).returncode == 0
    first, second = World(["-m", "ddptrain", *TRAINING], cwd=tmp_path, environs=environs, executed=False).end()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    (reported,) = re.findall(r"^goodput +(\d+) % of ([0-9.]+) s per rank", first.out, re.MULTILINE)
    assert (reported[0], float(reported[1]) > 50_000) == ("0", True)
