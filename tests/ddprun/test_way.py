"""The way to node 0: every failure of the network is a whole sentence, of a name, an address, a port."""

import errno
import os
import socket
import threading
import time

import psutil
import pytest

from ddprun import contract, network, options, preflight, report
from ddprun.errors import NodeError


def read(*argv, **environ):
    return contract.read(options.parse([*argv, "train.py"]), environ, lambda _: 1)


def two(node, master, *argv, **environ):
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", master, "--master-port", "61234"]
    return read(*place, *argv, **environ)


def find(place):
    said = []
    return preflight.find_way(place, report.Report(said.append, quiet=False)), said


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
    monkeypatch.setattr(preflight, "PATIENCE_S", 0.5)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ECONNREFUSED, "refused the connection: nothing listens there yet, or a firewall resets it"),
        (errno.ECONNRESET, "took the connection and reset it: a proxy, or a firewall, is in between"),
        (errno.ETIMEDOUT, "does not answer: a firewall drops what is sent, or the address is another network's"),
        (errno.EHOSTUNREACH, "cannot be reached: that machine is down, its link is, or a router sends it back"),
        (errno.ENETUNREACH, "cannot be reached: no route leads there from this machine"),
        (errno.EIO, "cannot be reached: input/output error"),
    ],
)
def test_what_a_failed_connection_means(number, sentence):
    error = OSError(number, os.strerror(number))
    assert network.why(error, "10.0.0.1", 61234) == f"10.0.0.1:61234 {sentence}"


def test_a_silent_connection_is_told_from_a_refused_one():
    with pytest.raises(OSError, match="refused") as caught:
        network.reach("127.0.0.1", 1)
    assert network.why(caught.value, "127.0.0.1", 1) == (
        "127.0.0.1:1 refused the connection: nothing listens there yet, and it is this machine itself"
    )
    assert network.why(TimeoutError("timed out"), "10.0.0.1", 1).startswith("10.0.0.1:1 does not answer: ")


@pytest.mark.parametrize(("flags", "number"), [("0x0", errno.EHOSTUNREACH), ("0x2", None)])
def test_a_machine_that_is_down_is_known_before_the_kernel_gives_up(monkeypatch, tmp_path, flags, number):
    table = tmp_path / "arp"
    table.write_text(f"IP address HW type Flags\n10.0.0.10 0x1 0x2\n10.0.0.1 0x1 {flags} 00:00:00:00:00:00 * eth0\n")

    def is_silent(where, timeout):
        assert (where, timeout) == (("10.0.0.1", 61234), 1.5)
        raise TimeoutError("timed out")

    monkeypatch.setattr(network, "NEIGHBOURS", table)
    monkeypatch.setattr(network.socket, "create_connection", is_silent)
    with pytest.raises(OSError, match=r"timed out|no route") as caught:
        network.reach("10.0.0.1", 61234, timeout_s=1.5)
    assert caught.value.errno == number


def test_what_is_wrong_with_the_way_is_said_before_torch_is_imported(runs, tmp_path):
    (tmp_path / "torch.py").write_text("import os; os._exit(99)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    for master, code in (("nobody.invalid", 69), ("127.0.0.1", 99)):
        node = runs.start(
            "act.py", node=1, nodes="2", port=1, options=("--master-addr", master), env={"PYTHONPATH": path}
        )
        assert node.end() == code


def test_a_name_that_does_not_exist(monkeypatch):
    resolver(monkeypatch)
    with pytest.raises(NodeError) as caught:
        find(two(1, "nobody"))
    assert str(caught.value) == "node-1: nobody does not resolve: name or service not known"
    assert caught.value.outcome.code == 69


def test_a_name_server_that_does_not_answer(monkeypatch):
    resolver(monkeypatch)
    began = time.monotonic()
    with pytest.raises(NodeError) as caught:
        find(two(1, "slow"))
    assert time.monotonic() - began < 2
    assert str(caught.value) == "node-1: slow does not resolve: the name server does not answer"


def test_in_kubernetes_a_name_may_come_later(monkeypatch):
    hosts = {}
    monkeypatch.setattr(preflight, "PATIENCE_S", 0.0)
    monkeypatch.setattr(network, "resolve", lambda host, **_: hosts.get(host) or fail())
    threading.Timer(0.5, hosts.update, [{"bert-worker-0": "10.0.0.1"}]).start()
    monkeypatch.setattr(network, "source_address", lambda _: "127.0.0.1")
    way, _ = find(two(1, "bert-worker-0", KUBERNETES_SERVICE_HOST="10.96.0.1"))
    assert way.address == "10.0.0.1"


def fail():
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("address", "hint"), [("127.0.1.1", " (Debian's line '127.0.1.1 me' in /etc/hosts)"), ("127.0.0.1", "")]
)
def test_a_name_that_leads_back_here(monkeypatch, address, hint):
    resolver(monkeypatch, me=address)
    monkeypatch.setattr(network, "addresses", lambda: "10.0.0.3 (eth0)")
    with pytest.raises(NodeError) as caught:
        find(two(0, "me"))
    assert (str(caught.value), caught.value.outcome.code) == (
        f"here me is {address}, which other machines cannot reach{hint}: "
        "give node 0's address on the network as --master-addr; this machine has 10.0.0.3 (eth0)",
        78,
    )
    way, _ = find(two(1, "me", DDP_NODES_HERE="2"))  # all nodes on one machine: then it is right
    assert (way.address, way.own) == (address, "127.0.0.1")


def test_an_address_that_is_another_machines(monkeypatch):
    monkeypatch.setattr(network, "addresses", lambda: "10.0.0.3 (eth0)")
    monkeypatch.setattr(network, "source_address", lambda _: "127.0.0.1")
    with pytest.raises(NodeError) as caught:
        find(two(0, "203.0.113.7"))
    assert str(caught.value) == (
        "203.0.113.7 is no address of this machine, which has to listen there; it has 10.0.0.3 (eth0)"
    )
    with pytest.raises(NodeError) as caught:
        find(two(1, "203.0.113.7", "--local-addr", "10.0.0.4"))
    assert str(caught.value) == "--local-addr is 10.0.0.4, but this machine has 10.0.0.3 (eth0)"


def test_node_0_holds_its_port_and_names_the_interface():
    way, said = find(read("--master-addr", "127.0.0.1", "--master-port", "0"))
    with way.listener:
        assert (way.address, way.own, way.interface) == ("127.0.0.1", "127.0.0.1", loopback())
        with pytest.raises(ConnectionRefusedError):  # held, but nobody is let in before there is a store
            network.reach("127.0.0.1", way.listener.getsockname()[1])
    assert said == []
