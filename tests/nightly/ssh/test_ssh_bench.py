"""bench/ssh.py and bench/sync.py at a small size: they measure what they say, and nothing is out of all proportion."""

import pytest
from bench import ssh, sync
from tests.cluster.ssh_lab import MISSING

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")


def test_connecting_costs_no_more_than_by_fabric() -> None:
    found = ssh.measure(8, 1)
    assert {row: len(times) for row, times in found.items()} == dict.fromkeys((*ssh.ROWS, *ssh.VERBS), 1)
    # The bar of 64 hosts is 1.1; here start-up weighs more, and the machine may be busy.
    (ours,), (fabrics,) = found[ssh.CONNECT], found[ssh.FABRIC]
    assert ours[1] < 1.6 * fabrics[1]


def test_a_project_is_sent_by_each_tool() -> None:
    tools = ("ddpctl, no rsync", "tar | ssh")
    found = sync.measure(2, 50, 1_000_000, 1, tools)
    assert [len(found[tool]) for tool in tools] == [1, 1]
    # The bar of 100 MB to four hosts is 1.2; here start-up weighs more, and the machine may be busy.
    assert found[tools[0]][0][0] < 5 * found[tools[1]][0][0]
