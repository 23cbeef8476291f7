"""The nodes meet, or say why they do not."""

import json
import os
import re
import signal
import socket

import psutil
from tests.messages import assert_names

from ddpwire.run_files import Outcome


def test_nodes_that_do_not_match_are_refused_on_both_with_both_values(runs):
    port = runs.free_port()
    second = runs.start("act.py", node=1, nodes="2", port=port, env={"DDP_IMAGE": "train:1"})
    first = runs.start("act.py", node=0, nodes="2", port=port, env={"DDP_IMAGE": "train:2"})
    assert (first.end(), second.end()) == (78, 78)
    assert (first.outcome().cause, second.outcome().cause) == ("config", "config")
    assert first.outcome().message == second.outcome().message
    for value in ("train:1 on node 1", "train:2 on node 0"):
        assert value in first.outcome().message


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


def test_nodes_may_have_different_numbers_of_ranks(runs):
    """As under torchrun: tests/nightly/e2e/test_torchrun_table.py compares all variables."""
    port, counts = runs.free_port(), (2, 1)
    nodes = [
        runs.start("say.py", node=node, nodes="2", port=port, options=("--nproc-per-node", str(count)))
        for node, count in enumerate(counts)
    ]
    assert [node.end() for node in nodes] == [0, 0]
    seen = [json.loads(nodes[node].log(rank).partition("\n")[0])["env"] for rank, node in enumerate((0, 0, 1))]
    expected = ["0 0 3 2 0 2 0", "1 1 3 2 0 2 1", "2 0 3 1 1 2 2"]
    assert [" ".join(env[name] for name in PLACE) for env in seen] == expected
    for node in nodes:
        assert "ddp_world_size_expected 3.0" in (node.folder / "metrics.prom").read_text()


def test_a_debugged_rank_that_no_node_has_is_refused_when_the_nodes_have_met(runs):
    port = runs.free_port()
    options = (("--nproc-per-node", "2", "--debug-rank", "3"), ("--debug-rank", "3"))
    nodes = [runs.start("act.py", node=node, nodes="2", port=port, options=options[node]) for node in (0, 1)]
    assert [node.end() for node in nodes] == [78, 78]
    assert_names(nodes[0].outcome().message, "--debug-rank", "3", "0 to 2")


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [address.address for address in owned])


def test_check_only_prints_what_it_found_and_starts_nothing(runs):
    port = runs.free_port()
    first, second = runs.pair("act.py", options=("--check-only",), port=port)
    assert (first.end(), second.end()) == (0, 0)
    rows = [line.split(maxsplit=2) for line in first.stdout.read_text().splitlines()]
    assert [row[:2] for row in rows] == [
        ["step", "result"],
        *([step, "ok"] for step in ("resolve", "address", "port")),
        ["limits", rows[4][1]],  # this machine's
        *([step, "ok"] for step in ("compare", "meet")),
    ]
    assert [rows[1][2], rows[2][2], rows[3][2]] == [
        "127.0.0.1",
        f"127.0.0.1 on {loopback()}",
        f"{port} on 127.0.0.1 is free",
    ]
    assert rows[-1][2] == "2 of 2 nodes"
    rows = [line.split(maxsplit=2) for line in second.stdout.read_text().splitlines()]
    assert [row[0] for row in rows[1:]] == ["resolve", "address", "limits", "reach", "compare", "clock", "meet"]
    assert rows[4] == ["reach", "ok", f"127.0.0.1:{port} answers"]
    assert first.log(0) == second.log(1) == ""


def start(runs, script, *args, host="127.0.0.1", port, nodes="2", options=()):
    """Start a ddprun that is not told which node it is."""
    line = ("--nnodes", nodes, "--rdzv-id", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}")
    return runs.start(script, *args, options=(*line, *options))


def test_a_node_0_that_does_not_come_is_named(runs):
    port = runs.free_port()
    node = start(runs, "act.py", port=port, options=("--join-timeout", "1", "--rdzv-conf", "is_host=0"))
    assert node.end() == 142
    assert f"127.0.0.1:{port}" in node.messages()[-1]


def test_the_address_that_debian_gives_its_own_name_is_refused_before_torch_is_imported(runs, monkeypatch):
    """``hostname --ip-address`` prints it, and batch scripts take it for an address on the network."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    for node in runs.pair("act.py", "all=0", options=("--master-addr", "127.0.1.1")):
        assert node.end() == 78
        assert_names(node.messages()[-1], "127.0.1.1", "hostname --ip-address", "--master-addr")
        assert re.findall(r"\| +torch$", node.stderr.read_text(), re.MULTILINE) == []


def test_one_node_too_many_is_refused(runs):
    port = runs.free_port()
    pair = [start(runs, "act.py", port=port) for _ in range(2)]
    runs.until(lambda: all((runs.run_dir / f"node-{k}" / f"rank-{k}.log").exists() for k in (0, 1)))
    third = start(runs, "act.py", port=port, options=("--join-timeout", "1"))
    assert third.end() == 78
    assert ["2 nodes" in line for line in third.messages()] == [True, True]
    for node in pair:
        node.process.send_signal(signal.SIGTERM)
        node.end()


def test_a_node_that_does_not_begin_tells_node_0_why(runs):
    port = runs.free_port()
    first = runs.start("act.py", nodes="2", port=port)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=("--nproc-per-node=abc",))
    assert (first.end(), second.end()) == (78, 78)
    assert first.facts() == Outcome(code=78, cause="config", message="", node=1)
    assert first.outcome().message.partition(" start: ")[2] in second.stderr.read_text()
    assert "--nproc-per-node is 'abc'" in first.outcome().message


def test_a_node_that_does_not_come_is_named(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--join-timeout", "1"))
    assert node.end() == 142
    assert node.outcome().cause == "absent"
    assert "node 1 of 2" in node.outcome().message


def test_a_node_of_another_run_is_refused(runs):
    port = runs.free_port()
    options = ("--join-timeout", "8", "--run-id")
    second = runs.start("act.py", node=1, nodes="2", port=port, options=(*options, "b"))
    first = runs.start("act.py", node=0, nodes="2", port=port, options=(*options, "a"))
    assert second.end() == 78
    assert second.outcome().cause == "config"
    assert "'b' on node 1, but 'a' on node 0" in second.outcome().message
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143


def test_a_taken_port_names_its_holder(runs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = runs.start("act.py", nodes="2", port=port)
        assert node.end() == 69
    holder = f"pid {os.getpid()} ({' '.join(psutil.Process().cmdline())[:80]})"
    lines = "\n".join(node.messages())
    assert holder in lines
    assert f"port {port} on 127.0.0.1" in lines


def test_an_error_of_the_route_is_reported_before_torch_is_imported(runs, tmp_path):
    (tmp_path / "torch.py").write_text("import os; os._exit(99)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    for master, code in (("nobody.invalid", 69), ("127.0.0.1", 99)):
        node = runs.start(
            "act.py", node=1, nodes="2", port=1, options=("--master-addr", master), env={"PYTHONPATH": path}
        )
        assert node.end() == code
