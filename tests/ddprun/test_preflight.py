"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import hashlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from ddprun import clock, contract, environment, options, versions
from ddprun.share import Share


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [one.address for one in owned])


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
        run_id="a",
        run_dir=None,
        checkpoint_dir=None,
        max_restarts=0,
        share=Share(threads=1, bound=()),
        interface="eth0",
    )
    told = environment.of_rank(
        place, around, environment.Past(step=None, lost=""), Path("metrics"), {"NCCL_SOCKET_IFNAME": "ib0"}
    )
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("eth0", "ib0")
    told = environment.of_rank(place, around, environment.Past(step=None, lost=""), Path("metrics"), {})
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


def test_both_values_of_what_differs():
    first = {"torch": "2.15.0", "image": "a", "python": "3.11.7"}
    assert versions.differences(first, first, 2) == ""
    other = {"torch": "2.13.0", "image": "none", "python": "3.11.7", "sha256 of a.yaml": "12ab"}
    assert versions.differences(other, first, 2) == (
        "torch is 2.13.0 on node 2, but 2.15.0 on node 0; image is none on node 2, but a on node 0; "
        "sha256 of a.yaml is 12ab on node 2, but none on node 0"
    )


@pytest.mark.parametrize(
    ("mine", "firsts", "said"),
    [
        (["--lr", "0.1"], ["--lr", "0.1"], ""),
        (["--lr", "0.2"], ["--lr", "0.1"], "--lr of the script is not the same on node 2 as on node 0"),
        (["--lr=0.2"], ["--lr=0.1"], "--lr of the script is not the same on node 2 as on node 0"),
        (["a", "c"], ["a", "b"], "argument 2 of the script is not the same on node 2 as on node 0"),
        (["--quick"], [], "the script has 1 argument on node 2, but 0 on node 0"),
        (["--node_rank", "2", "--master-addr=c", "-x"], ["--node_rank", "0", "--master-addr=a", "-x"], ""),
    ],
)
@pytest.mark.parametrize("script", [["train.py"], ["-m", "train"]])
def test_an_argument_that_differs_is_named_unless_it_says_a_place(mine, firsts, said, script):
    def command(arguments):
        return contract.read(options.parse([*script, *arguments]), {}, lambda _: 1).command

    assert versions.other_argument(command(mine), versions.arguments(command(firsts)), 2) == said


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


def test_another_argument_is_a_warning(runs):
    port = runs.free_port()
    second = runs.start("act.py", "all=0", "1=0", node=1, nodes="2", port=port)
    first = runs.start("act.py", "all=0", "0=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    assert second.said() == [
        "[node1] warning: argument 2 of the script is not the same on node 1 as on node 0",
        "[node1] rank 1 of 2 started (attempt 1)",
    ]


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
