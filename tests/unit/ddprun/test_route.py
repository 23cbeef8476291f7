"""The route to node 0: every failure of the network names a host, an address, a port."""

import errno
import os
import socket
import threading
import time

import psutil
import pytest

from ddprun import network, node_config, options, preflight
from ddprun.errors import NodeError


def read(*argv, **environ):
    return node_config.read_config(options.parse([*argv, "train.py"]), environ, lambda _: 1)


def two(node, master, *argv, **environ):
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", master, "--master-port", "61234"]
    return read(*place, *argv, **environ)


def find(place):
    said = []
    return preflight.find_route(place, preflight.PreflightReport(said.append, quiet=False)), said


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [one.address for one in owned])


def resolver(monkeypatch, **hosts):
    """A name server that knows ``hosts``, and is as slow as it is told."""

    def getaddrinfo(host, *_, **__):
        if host == "slow":
            time.sleep(3)
        if host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (hosts[host], 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(preflight, "RETRY_S", 0.5)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(errno.ECONNREFUSED, id="refused"),
        pytest.param(errno.ECONNRESET, id="reset"),
        pytest.param(errno.ETIMEDOUT, id="timed-out"),
        pytest.param(errno.EHOSTUNREACH, id="host-unreachable"),
        pytest.param(errno.ENETUNREACH, id="network-unreachable"),
        pytest.param(errno.EIO, id="other"),
    ],
)
def test_what_a_failed_connection_means(wording, number):
    error = OSError(number, os.strerror(number))
    described = network.describe_error(error, "10.0.0.1", 61234)
    assert described.split()[0] == "10.0.0.1:61234"
    wording(described)


def test_a_silent_connection_is_distinguished_from_a_refused_one(wording):
    with pytest.raises(OSError, match="refused") as caught:
        network.check_reachable("127.0.0.1", 1)
    wording(network.describe_error(caught.value, "127.0.0.1", 1))
    silent = OSError(errno.ETIMEDOUT, "timed out")
    described = network.describe_error(TimeoutError("timed out"), "10.0.0.1", 1)
    assert described == network.describe_error(silent, "10.0.0.1", 1)
    wording(described)


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


def test_an_error_of_the_route_is_reported_before_torch_is_imported(runs, tmp_path):
    (tmp_path / "torch.py").write_text("import os; os._exit(99)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    for master, code in (("nobody.invalid", 69), ("127.0.0.1", 99)):
        node = runs.start(
            "act.py", node=1, nodes="2", port=1, options=("--master-addr", master), env={"PYTHONPATH": path}
        )
        assert node.end() == code


def test_a_name_that_does_not_exist(wording, monkeypatch):
    resolver(monkeypatch)
    with pytest.raises(NodeError) as caught:
        find(two(1, "nobody"))
    assert caught.value.outcome.code == 69
    wording(caught.value)


def test_a_name_server_that_does_not_answer(wording, monkeypatch):
    resolver(monkeypatch)
    with pytest.raises(NodeError) as caught:
        find(two(1, "slow"))
    assert caught.value.outcome.code == 69
    wording(caught.value)


def test_in_kubernetes_a_name_may_come_later(monkeypatch):
    hosts = {}
    monkeypatch.setattr(preflight, "RETRY_S", 0.0)
    monkeypatch.setattr(network, "resolve", lambda host, **_: hosts.get(host) or fail())
    threading.Timer(0.5, hosts.update, [{"bert-worker-0": "10.0.0.1"}]).start()
    monkeypatch.setattr(network, "source_address", lambda _: "127.0.0.1")
    route, _ = find(two(1, "bert-worker-0", KUBERNETES_SERVICE_HOST="10.96.0.1"))
    assert route.address == "10.0.0.1"


def fail():
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_a_name_of_the_loopback_is_refused_on_several_machines(wording, monkeypatch, address):
    resolver(monkeypatch, me=address)
    monkeypatch.setattr(network, "local_addresses", lambda: "10.0.0.3 (eth0)")
    with pytest.raises(NodeError) as caught:
        find(two(0, "me"))
    assert caught.value.outcome.code == 78
    wording(caught.value)
    route, _ = find(two(1, "me", DDP_NODES_HERE="2"))  # all nodes on one machine: then it is right
    assert (route.address, route.own) == (address, "127.0.0.1")


def test_an_address_of_another_machine_is_refused(wording, monkeypatch):
    monkeypatch.setattr(network, "local_addresses", lambda: "10.0.0.3 (eth0)")
    monkeypatch.setattr(network, "source_address", lambda _: "127.0.0.1")
    with pytest.raises(NodeError) as caught:
        find(two(0, "203.0.113.7"))
    assert caught.value.outcome.code == 69
    wording(caught.value)
    with pytest.raises(NodeError) as caught:
        find(two(1, "203.0.113.7", "--local-addr", "10.0.0.4"))
    assert caught.value.outcome.code == 78
    wording(caught.value)


def test_node_0_holds_its_port_and_names_the_interface():
    route, said = find(read("--master-addr", "127.0.0.1", "--master-port", "0"))
    with route.listener:
        assert (route.address, route.own, route.interface) == ("127.0.0.1", "127.0.0.1", loopback())
        with pytest.raises(ConnectionRefusedError):  # held, but nobody is let in before there is a store
            network.check_reachable("127.0.0.1", route.listener.getsockname()[1])
    assert said == []


def test_a_free_port_is_reserved_before_it_listens():
    with network.bind_free_port("127.0.0.1") as ours:
        with pytest.raises(OSError, match="in use"):
            network.bind("127.0.0.1", ours.getsockname()[1])
        ours.listen()
