"""bench/ssh.py and bench/sync.py at a small size: they measure what they say, and nothing is out of all proportion."""

import statistics

import pytest
from bench import ssh, sync
from tests.cluster.ssh_lab import MISSING

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")


def test_a_status_is_not_slower_than_its_connections() -> None:
    found = ssh.measure(8, 3)
    assert {name: len(times) for name, times in found.items()} == {
        "ddpctl status": 3,
        "fabric group": 3,
        "xargs ssh": 3,
    }
    # The bar of 64 hosts is 1.5; here start-up weighs more, and the machine may be busy.
    assert statistics.median(found["ddpctl status"]) < 3 * statistics.median(found["fabric group"])


def test_a_project_is_sent_by_each_tool() -> None:
    tools = ("ddpctl, no rsync", "tar | ssh")
    found = sync.measure(2, 50, 1_000_000, 1, tools)
    assert [len(found[tool]) for tool in tools] == [1, 1]
    # The bar of 100 MB to four hosts is 1.2; here start-up weighs more, and the machine may be busy.
    assert found[tools[0]][0][0] < 5 * found[tools[1]][0][0]
