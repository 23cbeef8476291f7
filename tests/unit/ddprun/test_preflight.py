"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import hashlib
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from ddprun import node_config, node_facts, options, rank_environment
from ddpwire import clock


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
            group, worker, config, Path("m"), base, attempt=1, steps_before=None, lost="", threads=1, interface="eth0"
        )
        return env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]

    assert interfaces({"NCCL_SOCKET_IFNAME": "ib0"}) == ("eth0", "ib0")
    assert interfaces({}) == ("eth0", "=eth0")


def test_both_values_of_what_differs():
    first = {"torch": "2.15.0", "image": "train:1", "python": "3.11.7"}
    assert node_facts.differences(first, first, 2) == ""
    other = {"torch": "2.13.0", "image": "none", "python": "3.11.7", "sha256 of a.yaml": "a6a5452e568e"}
    found = node_facts.differences(other, first, 2)
    assert [one.partition(" is ")[0] for one in found.split("; ")] == ["torch", "image", "sha256 of a.yaml"]
    for value in ("2.13.0 on node 2", "2.15.0 on node 0", "train:1 on node 0", "a6a5452e568e on node 2"):
        assert value in found


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
def test_an_argument_that_differs_is_named_unless_it_is_for_placement(mine, firsts, named, script):
    def command(arguments):
        return node_config.read_config(options.parse([*script, *arguments]), {}, lambda _: 1).command

    found = node_facts.differing_argument(command(mine), node_facts.argument_hashes(command(firsts)), 2)
    assert bool(found) == bool(named)
    assert named in found


@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 0.0])
def test_how_far_a_clock_is_ahead(ahead_s):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    clock.answer_requests(store.clone())
    assert clock.offset_s(store, lambda: time.time() + ahead_s) == pytest.approx(ahead_s, abs=20)
