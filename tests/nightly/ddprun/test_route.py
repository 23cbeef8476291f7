"""The route to node 0: every failure of the network names a host, an address, a port."""

import errno

import pytest
from tests.unit.ddprun.test_route import find, resolver, two

from ddprun.settings import node_config, options
from ddprun.system import network
from ddprun.system.errors import NodeError


def read(*argv, **environ):
    return node_config.read_config(options.parse([*argv, "train.py"]), environ, lambda _: 1)


def test_a_silent_connection_is_distinguished_from_a_refused_one():
    with pytest.raises(OSError, match="refused") as caught:
        network.check_reachable("127.0.0.1", 1)
    assert "127.0.0.1:1 " in network.describe_error(caught.value, "127.0.0.1", 1)
    silent = OSError(errno.ETIMEDOUT, "timed out")
    described = network.describe_error(TimeoutError("timed out"), "10.0.0.1", 1)
    assert described == network.describe_error(silent, "10.0.0.1", 1)
    assert "10.0.0.1:1 " in described


@pytest.mark.parametrize(("flags", "number"), [("0x0", errno.EHOSTUNREACH), ("0x2", None)])
def test_a_machine_that_is_down_is_known_before_the_kernel_gives_up(monkeypatch, tmp_path, flags, number):
    table = tmp_path / "arp"
    table.write_text(f"IP address HW type Flags\n10.0.0.10 0x1 0x2\n10.0.0.1 0x1 {flags} 00:00:00:00:00:00 * eth0\n")

    def is_silent(where, timeout):
        assert (where, timeout) == (("10.0.0.1", 61234), 1.5)
        raise TimeoutError("timed out")

    monkeypatch.setattr(network, "ARP_TABLE", table)
    monkeypatch.setattr(network.socket, "create_connection", is_silent)
    with pytest.raises(OSError, match=r"timed out|no route") as caught:
        network.check_reachable("10.0.0.1", 61234, timeout_s=1.5)
    assert caught.value.errno == number


def test_a_name_server_that_does_not_answer(monkeypatch):
    resolver(monkeypatch)
    with pytest.raises(NodeError) as caught:
        find(two(1, "slow"))
    assert (caught.value.outcome.code, "'slow'" in str(caught.value)) == (69, True)


def test_a_free_port_is_reserved_before_it_listens():
    with network.bind_free_port("127.0.0.1") as ours:
        with pytest.raises(OSError, match="in use"):
            network.bind("127.0.0.1", ours.getsockname()[1])
        ours.listen()
