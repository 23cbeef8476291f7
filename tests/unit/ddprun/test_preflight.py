"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import hashlib
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import TCPStore

from ddprun import node_config, node_facts, options, rank_environment
from ddpwire import clock


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [one.address for one in owned])


def test_the_script_and_its_configuration_are_compared_and_nothing_else(tmp_path):
    for name in ("train.py", "a.yaml", "b.toml", "results.json"):
        (tmp_path / name).write_text(name)
    arguments = ["--config", "a.yaml", "--model-config=b.toml", "--out", "results.json", "--config", "none.yaml"]
    words = [str(tmp_path / word) if "." in word and "=" not in word else word for word in ["train.py", *arguments]]
    words[3] = f"--model-config={tmp_path / 'b.toml'}"
    asked = node_config.read_config(options.parse(words), {}, lambda _: 1)
    hashed = {what: value for what, value in node_facts.read_facts(asked, {}).items() if what.startswith("sha256")}
    assert hashed == {
        f"sha256 of {name}": hashlib.sha256(name.encode()).hexdigest()[:12] for name in ("train.py", "a.yaml", "b.toml")
    }


def test_the_ranks_are_told_the_interface_unless_somebody_has():
    group = SimpleNamespace(group_rank=0, group_world_size=1, master_addr="10.0.0.1", master_port=1)
    worker = SimpleNamespace(global_rank=0, local_rank=0, world_size=1, role_rank=0, role_world_size=1)
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)

    def interfaces(base):
        env = rank_environment.rank_environment(
            group, worker, config, Path("m"), base, attempt=1, steps_before=None, runtime=Path("r"), lost="", threads=1,
            interface="eth0",
        )  # fmt: skip
        return env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]

    assert interfaces({"NCCL_SOCKET_IFNAME": "ib0"}) == ("eth0", "ib0")
    assert interfaces({}) == ("eth0", "=eth0")


def test_both_values_of_what_differs(wording):
    first = {"torch": "2.15.0", "image": "train:1", "python": "3.11.7"}
    assert node_facts.differences(first, first, 2) == ""
    other = {"torch": "2.13.0", "image": "none", "python": "3.11.7", "sha256 of a.yaml": "a6a5452e568e"}
    found = node_facts.differences(other, first, 2)
    assert [one.partition(" is ")[0] for one in found.split("; ")] == ["torch", "image", "sha256 of a.yaml"]
    wording(found)


def test_the_drivers_branch_is_compared_and_for_cpu_ranks_nothing(monkeypatch):
    first = {"torch": "2.15.0", "driver": "570.86.15"}
    assert node_facts.differences({**first, "driver": "570.124.06"}, first, 1) == ""
    assert node_facts.driver_difference({"driver": "570.124.06"}, first, 1) == (
        "the driver is 570.124.06 on node 1, but 570.86.15 on node 0"
    )
    assert node_facts.driver_difference(first, first, 1) == ""
    assert node_facts.differences({**first, "driver": "550.54.14"}, first, 1).startswith(
        "driver is 550.54.14 on node 1"
    )
    assert node_facts.differences({**first, "driver": "none"}, first, 1).startswith("driver is none on node 1")
    monkeypatch.setattr(node_facts.machine, "driver_version", lambda: "570.86.15")
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    assert node_facts.read_facts(config, {})["driver"] == "570.86.15"
    assert node_facts.read_facts(config, {"DDP_DEVICE": "cpu"})["driver"] == "none"


@pytest.mark.parametrize(
    ("mine", "firsts", "named"),
    [
        pytest.param(["--lr", "0.1"], ["--lr", "0.1"], "", id="same"),
        pytest.param(["--lr", "0.2"], ["--lr", "0.1"], "--lr", id="option"),
        pytest.param(["--lr=0.2"], ["--lr=0.1"], "--lr", id="option-with-equals"),
        pytest.param(["a", "c"], ["a", "b"], "argument 2", id="argument"),
        pytest.param(["--quick"], [], "1 argument", id="number"),
        pytest.param(
            ["--node_rank", "2", "--master-addr=c", "-x"],
            ["--node_rank", "0", "--master-addr=a", "-x"],
            "",
            id="placement",
        ),
    ],
)
@pytest.mark.parametrize("script", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_an_argument_that_differs_is_named_unless_it_is_for_placement(wording, mine, firsts, named, script):
    def command(arguments):
        return node_config.read_config(options.parse([*script, *arguments]), {}, lambda _: 1).command

    found = node_facts.differing_argument(command(mine), node_facts.argument_hashes(command(firsts)), 2)
    assert bool(found) == bool(named)
    assert named in found
    wording(found)


@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 0.0])
def test_how_far_a_clock_is_ahead(ahead_s):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    clock.answer_requests(store.clone())
    assert clock.offset_s(store, lambda: time.time() + ahead_s) == pytest.approx(ahead_s, abs=20)


def test_nodes_that_do_not_match_are_refused_on_both_with_both_values(runs, wording):
    port = runs.free_port()
    second = runs.start(
        "act.py", node=1, nodes="2", port=port, env={"DDP_IMAGE": "train:1"}, options=("--nproc-per-node", "2")
    )
    first = runs.start("act.py", node=0, nodes="2", port=port, env={"DDP_IMAGE": "train:2"})
    assert (first.end(), second.end()) == (78, 78)
    assert (first.outcome().cause, second.outcome().cause) == ("config", "config")
    assert first.outcome().message == second.outcome().message
    wording(first.outcome().message)


def test_another_argument_is_a_warning(runs, wording):
    port = runs.free_port()
    second = runs.start("act.py", "all=0", "1=0", node=1, nodes="2", port=port)
    first = runs.start("act.py", "all=0", "0=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    wording("\n".join(second.said()))


def test_clocks_a_minute_apart_are_a_warning(runs, wording, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.time = lambda real=time.time: real() - 60\n")
    port = runs.free_port()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    second = runs.start("act.py", "all=0", node=1, nodes="2", port=port, env={"PYTHONPATH": path})
    first = runs.start("act.py", "all=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    lines = "\n".join(second.said())
    (seconds,) = re.findall(r"([0-9.]+) s ", lines)
    assert 40 < float(seconds) < 80  # half of the round trip's time is the error, on a busy machine
    wording(lines.replace(f"{seconds} s ", "N s "))


def test_another_server_on_node_0s_port_is_no_store(runs, wording):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        node = runs.start("act.py", node=1, nodes="2", port=port)
        assert node.end() == 69
    assert node.outcome().cause == "unavailable"
    wording(node.outcome().message, port=port)


def test_check_only_prints_what_it_found_and_starts_nothing(runs):
    port = runs.free_port()
    options = ("--check-only",)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=options)
    first = runs.start("act.py", node=0, nodes="2", port=port, options=options)
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


def test_check_only_fails_with_the_message_and_the_code(runs, wording):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--check-only", "--join-timeout", "0.5"))
    assert node.end() == 142
    *row, message = node.stdout.read_text().splitlines()[-1].split(maxsplit=2)
    assert row == ["meet", "failed"]
    wording(message)
