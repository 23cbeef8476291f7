"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import os
import re
import socket
import time
from datetime import timedelta

import pytest
from tests.unit.ddprun import test_preflight
from tests.unit.ddprun.test_preflight import PROGRAMS
from torch.distributed import TCPStore

from ddprun.settings import node_config, node_facts, options
from ddpwire import clock


def test_another_argument_is_a_warning(runs):
    port = runs.free_port()
    second = runs.start("act.py", "all=0", "1=0", node=1, nodes="2", port=port)
    first = runs.start("act.py", "all=0", "0=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    assert ["argument 2" in line for line in second.messages()] == [True, False]


def test_clocks_a_minute_apart_are_a_warning(runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.time = lambda real=time.time: real() - 60\n")
    port = runs.free_port()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    second = runs.start("act.py", "all=0", node=1, nodes="2", port=port, env={"PYTHONPATH": path})
    first = runs.start("act.py", "all=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    lines = "\n".join(second.messages())
    (seconds,) = re.findall(r"([0-9.]+) s ", lines)
    assert 40 < float(seconds) < 80  # half of the round trip's time is the error, on a busy machine
    assert "node-1" in lines


def test_another_server_on_node_0s_port_is_no_store(runs):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        node = runs.start("act.py", node=1, nodes="2", port=port)
        assert node.end() == 69
    assert node.outcome().cause == "unavailable"
    assert f"127.0.0.1:{port}" in node.outcome().message


def test_check_only_fails_with_the_message_and_the_code(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--check-only", "--join-timeout", "0.5"))
    assert node.end() == 142
    *row, message = node.stdout.read_text().splitlines()[-1].split(maxsplit=2)
    assert row == ["meet", "failed"]
    assert "node 1 of 2" in message


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


@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 0.0])
def test_how_far_a_clock_is_ahead(ahead_s):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    clock.answer_requests(store.clone())
    assert clock.offset_s(store, lambda: time.time() + ahead_s) == pytest.approx(ahead_s, abs=20)


@pytest.mark.parametrize("script", [["train.py"], ["-m", "train"]], ids=["script", "module"])
@pytest.mark.parametrize(
    ("own", "firsts", "named"),
    [
        pytest.param(["--lr=0.2"], ["--lr=0.1"], "--lr", id="option-with-equals"),
        pytest.param(["--quick"], [], "1 argument", id="number"),
    ],
)
def test_an_argument_that_differs_is_named_unless_it_is_for_placement(own, firsts, named, script):
    test_preflight.test_an_argument_that_differs_is_named_unless_it_is_for_placement(own, firsts, named, script)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": None}),
        ({}, {"PATH": f"{PROGRAMS}:{os.defpath}"}),
        ({"PATH": f"/usr/bin:{PROGRAMS}"}, {"PATH": f"/usr/bin:{PROGRAMS}"}),
    ],
)
def test_the_ranks_are_told_the_interface_what_to_record_and_their_programs_unless_the_user_has(base, expected):
    test_preflight.test_the_ranks_are_told_the_interface_what_to_record_and_their_programs_unless_the_user_has(
        base, expected
    )
