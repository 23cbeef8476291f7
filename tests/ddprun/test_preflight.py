"""The preflight says what is wrong, in whole sentences: of this machine, of the way, of the nodes that meet."""

import errno
import hashlib
import os
import socket
import sys
import threading
import time
import types
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from ddprun import clock, contract, environment, health, network, options, preflight, report, versions
from ddprun.errors import NodeError

GOOD = health.Machine(shm_bytes=8 * health.GIB, memlock_bytes=None, open_files=None, num_gpus=0)


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


@pytest.mark.parametrize(
    ("changes", "nproc", "device", "lines"),
    [
        ({}, 8, "", []),
        (
            {"shm_bytes": 64 * health.MIB},
            1,
            "",
            [
                "/dev/shm has 64 MiB, and DataLoader workers die when it is full: 1024 MiB is right for 1 rank "
                "(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
            ],
        ),
        (
            {"shm_bytes": health.GIB},
            8,
            "",
            [
                "/dev/shm has 1024 MiB, and DataLoader workers die when it is full: 2048 MiB is right for 8 ranks "
                "(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
            ],
        ),
        ({"open_files": 256}, 1, "", ["256 open files are allowed, 1024 may be needed: ulimit -n 1024"]),
        ({"memlock_bytes": 65536}, 1, "", []),
        (
            {"memlock_bytes": 65536, "num_gpus": 1},
            1,
            "cuda",
            [
                "64 KiB may be locked in memory, and without more NCCL leaves InfiniBand for TCP: "
                "ulimit -l unlimited, before the container starts"
            ],
        ),
        ({"num_gpus": 1}, 2, "cuda", ["2 ranks on CUDA, but 1 GPU: ranks will share, or fail"]),
        (
            {"num_gpus": 2, "gpus": (health.Gpu(index=1, ecc_errors=3, pids=(12, 13)),)},
            2,
            "cuda",
            [
                "GPU 1 has had 3 uncorrected ECC errors: see nvidia-smi -q -d ECC",
                "GPU 1 is used by others too: pid 12, 13",
            ],
        ),
    ],
)
def test_what_may_hurt_is_a_line_each(changes, nproc, device, lines):
    assert list(health.warnings(replace(GOOD, **changes), nproc=nproc, num_nodes=2, device=device)) == lines


def test_reading_the_limits_of_this_machine():
    import resource

    machine = health.read(0)
    assert machine.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert machine.gpus == () or machine.num_gpus == 0


def test_what_nvml_tells(monkeypatch):
    """A double of the library, in the library's own words; a real one was not at hand."""

    def ecc_errors(handle, *_):
        if handle == "gpu1":
            raise NVMLError
        return 5

    class NVMLError(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a1": "gpu2"}[uuid],
        nvmlDeviceGetIndex=lambda handle: int(handle[3:]),
        nvmlDeviceGetTotalEccErrors=ecc_errors,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=12)] * (handle == "gpu1"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    all_of_them = tuple(
        health.Gpu(index=index, ecc_errors=errors, pids=pids)
        for index, errors, pids in ((0, 5, ()), (1, 0, (12,)), (2, 5, ()))
    )
    assert health.read(3).gpus == all_of_them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1,1")
    assert health.read(2).gpus == (all_of_them[2], all_of_them[1])
    assert health.driver_version() == "570.86"


def test_the_script_and_its_configuration_are_compared_and_nothing_else(tmp_path):
    for name in ("train.py", "a.yaml", "b.toml", "results.json"):
        (tmp_path / name).write_text(name)
    arguments = ["--config", "a.yaml", "--model-config=b.toml", "--out", "results.json", "--config", "none.yaml"]
    words = [str(tmp_path / word) if "." in word and "=" not in word else word for word in ["train.py", *arguments]]
    words[3] = f"--model-config={tmp_path / 'b.toml'}"
    asked = contract.read(options.parse(words), {}, lambda _: 1)
    hashed = {what: value for what, value in versions.facts(asked, {}).items() if what.startswith("sha256")}
    assert hashed == {
        f"sha256 of {name}": hashlib.sha256(name.encode()).hexdigest()[:12] for name in ("train.py", "a.yaml", "b.toml")
    }


def test_the_ranks_are_told_the_interface_unless_somebody_has():
    place = environment.Place(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        role_rank=0,
        role_world_size=1,
        node_rank=0,
        group_rank=0,
        group_world_size=1,
        master_addr="10.0.0.1",
        master_port=1,
        attempt=1,
    )
    around = environment.Surroundings(
        run_id="a", run_dir=None, checkpoint_dir=None, max_restarts=0, cores=1, interface="eth0"
    )
    told = environment.of_rank(place, around, Path("metrics"), {"NCCL_SOCKET_IFNAME": "ib0"})
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("eth0", "ib0")
    told = environment.of_rank(place, around, Path("metrics"), {})
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


def test_both_values_of_what_differs():
    first = {"torch": "2.15.0", "image": "a", "python": "3.11.7"}
    assert versions.differences(first, first, 2) == ""
    other = {"torch": "2.13.0", "image": "none", "python": "3.11.7", "sha256 of a.yaml": "12ab"}
    assert versions.differences(other, first, 2) == (
        "torch is 2.13.0 on node 2, but 2.15.0 on node 0; image is none on node 2, but a on node 0; "
        "sha256 of a.yaml is 12ab on node 2, but none on node 0"
    )


@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 0.0])
def test_how_far_a_clock_is_ahead(ahead_s):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    clock.answer(store.clone())
    assert clock.offset_s(store, lambda: time.time() + ahead_s) == pytest.approx(ahead_s, abs=0.5)


def test_nodes_that_do_not_match_are_refused_on_both_with_both_values(runs):
    port = runs.free_port()
    second = runs.start(
        "act.py", node=1, nodes="2", port=port, env={"DDP_IMAGE": "train:1"}, options=("--nproc-per-node", "2")
    )
    first = runs.start("act.py", node=0, nodes="2", port=port, env={"DDP_IMAGE": "train:2"})
    assert (first.end(), second.end()) == (78, 78)
    message = (
        "the nodes do not match: image is train:1 on node 1, but train:2 on node 0; "
        "number of ranks is 2 on node 1, but 1 on node 0; give all the same"
    )
    assert (first.outcome().message, second.outcome().message) == (message, message)


def test_clocks_a_minute_apart_are_a_warning(runs, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time; time.time = lambda real=time.time: real() - 60\n")
    port = runs.free_port()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    second = runs.start("act.py", "all=0", node=1, nodes="2", port=port, env={"PYTHONPATH": path})
    first = runs.start("act.py", "all=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    warning, started = second.said()
    before, seconds, after = warning.partition("60.0")
    assert (before, seconds, after[2:]) == (
        "[node1] warning: the clock of node-1 is ",
        "60.0",
        " s behind node 0's: times in logs and metrics will mislead (NTP?)",
    )
    assert started == "[node1] rank 1 of 2 started (attempt 1)"


def test_a_stranger_on_node_0s_port_is_no_store(runs):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        node = runs.start("act.py", node=1, nodes="2", port=port)
        assert node.end() == 69
    assert node.outcome().message == (
        f"127.0.0.1:{port} answers, but not as node 0's store: is something else listening there?"
    )


def test_check_only_says_what_it_found_and_starts_nothing(runs):
    port = runs.free_port()
    options = ("--check-only",)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=options)
    first = runs.start("act.py", node=0, nodes="2", port=port, options=options)
    assert (first.end(), second.end()) == (0, 0)
    rows = [line.split(maxsplit=2) for line in first.stdout.read_text().splitlines()]
    assert [row[:2] for row in rows] == [
        ["step", "verdict"],
        *([step, "ok"] for step in ("resolve", "address", "port")),
        ["limits", rows[4][1]],  # this machine's
        *([step, "ok"] for step in ("compare", "meet")),
    ]
    assert [rows[1][2], rows[2][2], rows[3][2]] == [
        "127.0.0.1",
        f"127.0.0.1 on {loopback()}",
        f"{port} on 127.0.0.1 is ours",
    ]
    assert rows[-1][2] == "2 of 2 nodes"
    rows = [line.split(maxsplit=2) for line in second.stdout.read_text().splitlines()]
    assert [row[0] for row in rows[1:]] == ["resolve", "address", "limits", "reach", "compare", "clock", "meet"]
    assert rows[4] == ["reach", "ok", f"127.0.0.1:{port} answers"]
    assert first.log(0) == second.log(1) == ""


def test_check_only_fails_with_the_sentence_and_the_code(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--check-only", "--join-timeout", "0.5"))
    assert node.end() == 142
    last = node.stdout.read_text().splitlines()[-1]
    assert last.split(maxsplit=2) == ["meet", "failed", "node 1 of 2 did not come within 0.5 s"]
