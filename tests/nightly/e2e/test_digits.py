"""The same weights bit for bit, however the ranks are placed on nodes."""

import re

from tests.e2e.driver import ddpctl


def test_the_weights_of_four_ranks_do_not_depend_on_their_nodes() -> None:
    runs = [
        ddpctl("launch", "--nodes", nodes, "--gpus", gpus, "--", "--epochs", "1", "--deterministic")
        for nodes, gpus in (("2", "2"), ("1", "4"))
    ]
    assert [run.returncode for run in runs] == [0, 0]
    fingerprints = [re.findall(r"weights\s+sha256 ([0-9a-f]{16})", run.stdout) for run in runs]
    assert len(fingerprints[0]) == 1
    assert fingerprints[0] == fingerprints[1]
