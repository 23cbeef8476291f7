"""bench/ssh.py at a small size: it measures what it says, and a status of a few hosts is not out of all proportion."""

import statistics

import pytest
from bench import ssh
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
