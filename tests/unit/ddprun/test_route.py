"""The route to node 0: every failure of the network names a host, an address, a port."""

import errno
import os
import socket
import threading
import time

import psutil
import pytest
from tests.messages import refused

from ddprun.nodes import preflight
from ddprun.settings import node_config, options
from ddprun.system import network
from ddprun.system.errors import NodeError


def read(*argv, **environ):
    return node_config.read_config(options.parse([*argv, "train.py"]), environ, lambda _: 1)


def two(node, master, *argv, **environ):
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", master, "--master-port", "61234"]
    return read(*place, *argv, **environ)


def find(place):
    lines = []
    return preflight.find_route(place, preflight.PreflightReport(lines.append, quiet=False)), lines


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [address.address for address in owned])


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


def test_each_failure_of_a_connection_is_described_apart():
    numbers = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EIO)
    texts = [network.describe_error(OSError(number, os.strerror(number)), "10.0.0.1", 61234) for number in numbers]
    assert len({*texts}) == len(numbers)
    assert all(text.startswith("10.0.0.1:61234 ") for text in texts)
    assert os.strerror(errno.EIO).lower() in texts[-1]


def test_a_name_that_does_not_resolve_is_refused(monkeypatch):
    resolver(monkeypatch)
    with refused(NodeError, "'nobody'", code=69):
        find(two(1, "nobody"))


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
def test_a_name_of_the_loopback_is_refused_on_several_machines(monkeypatch, address):
    resolver(monkeypatch, me=address)
    monkeypatch.setattr(network, "local_addresses", lambda: "10.0.0.3 (eth0)")
    with refused(NodeError, "'me'", address, "10.0.0.3 (eth0)", code=78):
        find(two(0, "me"))
    route, _ = find(two(1, "me", DDP_NODES_HERE="2"))  # all nodes on one machine: then it is right
    assert (route.address, route.own) == (address, "127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.1.1", "localhost"])
@pytest.mark.parametrize("meeting", ["--master-addr", "--rdzv-backend c10d --rdzv-endpoint"])
def test_a_loopback_address_is_refused_in_a_slurm_step_of_several_nodes(address, meeting):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2"}
    argv = ["--nnodes", "2", *meeting.split(), address]
    begin = time.monotonic()
    with refused(NodeError, address, code=78):
        find(read(*argv, SLURM_NODEID="1", **step))
    assert time.monotonic() - begin < preflight.RETRY_S  # no wait for a node that cannot join
    one_node = {**step, "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1"}
    assert read("--nnodes", "1", "--master-addr", address, **one_node).on_one_machine
    assert not read(*argv, SLURM_NODEID="1", **step).on_one_machine
    find(read(*argv, SLURM_NODEID="1", DDP_NODES_HERE="2", **step))  # ddpctl's own, on one machine


def test_an_address_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setattr(network, "local_addresses", lambda: "10.0.0.3 (eth0)")
    monkeypatch.setattr(network, "source_address", lambda _: "127.0.0.1")
    with refused(NodeError, "203.0.113.7", "10.0.0.3 (eth0)", code=69):
        find(two(0, "203.0.113.7"))
    with refused(NodeError, "10.0.0.4", "10.0.0.3 (eth0)", code=78):
        find(two(1, "203.0.113.7", "--local-addr", "10.0.0.4"))


def test_warnings_about_the_machine_are_logged_and_are_the_result_of_their_step(monkeypatch):
    monkeypatch.setattr(preflight.machine, "count_gpus", lambda: 2)
    monkeypatch.setattr(preflight.machine, "health_warnings", lambda num_gpus, **_: ["few"] * num_gpus)
    for device, result in (("cpu", "ok"), ("cuda", "warning")):
        monkeypatch.setenv("DDP_DEVICE", device)
        report = preflight.PreflightReport((lines := []).append, quiet=True)
        preflight.check_limits(read(), report)
        assert (report.steps[0].name, report.steps[0].result, len(lines)) == ("limits", result, 2 * (device == "cuda"))


def test_node_0_holds_its_port_and_names_the_interface():
    route, lines = find(read("--master-addr", "127.0.0.1", "--master-port", "0"))
    with route.listener:
        assert (route.address, route.own, route.interface) == ("127.0.0.1", "127.0.0.1", loopback())
        with pytest.raises(ConnectionRefusedError):  # held, but nobody is let in before there is a store
            network.check_reachable("127.0.0.1", route.listener.getsockname()[1])
    assert lines == []
