"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.messages import assert_names

from ddprun.ranks import rank_environment
from ddprun.settings import node_config, node_facts, options
from ddpwire import names
from ddpwire.run_files import PYTHON_RECORD


def test_the_script_and_its_configuration_are_compared_and_nothing_else(tmp_path):
    for name in ("train.py", "a.yaml", "b.toml", "results.json"):
        (tmp_path / name).write_text(name)
    arguments = ["--config", "a.yaml", "--model-config=b.toml", "--out", "results.json", "--config", "none.yaml"]
    argv = [str(tmp_path / word) if "." in word and "=" not in word else word for word in ["train.py", *arguments]]
    argv[3] = f"--model-config={tmp_path / 'b.toml'}"
    config = node_config.read_config(options.parse(argv), {}, lambda _: 1)
    hashed = {name: value for name, value in node_facts.read_facts(config, {}).items() if name.startswith("sha256")}
    assert hashed == {
        f"sha256 of {name}": hashlib.sha256(name.encode()).hexdigest()[:12] for name in ("train.py", "a.yaml", "b.toml")
    }


def test_the_environment_from_a_lock_is_compared(tmp_path, monkeypatch):
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    first = node_facts.read_facts(config, {})
    (tmp_path / PYTHON_RECORD).write_text('{"lock": "uv.lock 0123", "torch": "2.10.0", "packages": "16 (4567)"}')
    other = node_facts.read_facts(config, {})
    assert node_facts.differences(first, first, 1) == ""
    difference = node_facts.differences(other, first, 1)
    assert_names(difference, "environment", "uv.lock 0123", "16", 1)


def test_the_inventory_has_the_packages_that_python_finds_first(tmp_path, monkeypatch):
    for folder in ("a/torch-2.10.0+cpu.dist-info", "b/torch-2.9.0.dist-info", "b/NVIDIA_ml_py-13.1.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    config = node_config.read_config(options.parse(["train.py"]), {}, lambda _: 1)
    node_facts.read_facts(config, {})  # imports torch, which the next line hides
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/c.zip", ""])
    assert node_facts.inventory(config, {})["packages"] == "nvidia-ml-py==13.1 torch==2.10.0+cpu"
    assert "packages" not in node_facts.inventory(config, {names.IMAGE: "train:1"})


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        (("a b.py", "--token", "s3cret"), "a b.py"),
        (("-m", "pkg.mod", "s3cret"), "-m pkg.mod"),
        (("--run-path", "a.py", "s3cret"), "a.py"),
        (("--no-python", "./train.sh", "s3cret"), "./train.sh"),
    ],
)
def test_the_inventory_has_the_script_without_its_arguments(arguments, script):
    config = node_config.read_config(options.parse([*arguments]), {}, lambda _: 1)
    assert node_facts.inventory(config, {})["script"] == script
    assert "s3cret" not in str(node_facts.inventory(config, {}))


def environment_of_a_rank(base, *flags, rank=0, world_size=1):
    group = SimpleNamespace(group_rank=0, group_world_size=1, master_addr="10.0.0.1", master_port=1)
    worker = SimpleNamespace(global_rank=rank, local_rank=rank, world_size=world_size, role_rank=0, role_world_size=1)
    config = node_config.read_config(options.parse([*flags, "train.py"]), base, lambda _: 1)
    folder = SimpleNamespace(path=Path("m"), runtime=SimpleNamespace(path=Path("r")))
    node = SimpleNamespace(config=config, folder=folder)
    return rank_environment.rank_environment(
        group, worker, node, base, attempt=1, steps_before=None, lost="", spent="", threads=1, interface="eth0"
    )


@pytest.mark.parametrize("flags", [(), ("--virtual-local-rank",)])
def test_a_rank_on_the_cpu_sees_no_gpu(flags):
    for own in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):  # Slurm unsets the variable in a job without GPUs
        env = environment_of_a_rank({**own, "DDP_DEVICE": "cpu"}, *flags)
        assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == ("", "0")
    assert environment_of_a_rank({"CUDA_VISIBLE_DEVICES": "3"}, *flags)["CUDA_VISIBLE_DEVICES"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in environment_of_a_rank({"DDP_DEVICE": "auto"})


def test_a_rank_of_several_uses_the_store_of_ddprun_and_sees_its_own_gpu_if_asked():
    assert environment_of_a_rank({})["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    env = environment_of_a_rank({"CUDA_VISIBLE_DEVICES": "3, 5"}, "--virtual-local-rank", rank=1, world_size=2)
    assert (env["TORCHELASTIC_USE_AGENT_STORE"], env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("True", "0", "5")


PROGRAMS = str(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}),
        ({}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": None}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}, {"TORCH_FR_BUFFER_SIZE": None, "TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}),
        ({"PATH": "/usr/bin"}, {"PATH": f"{PROGRAMS}:/usr/bin"}),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, {"NCCL_P2P_DISABLE": "1"}),
        ({"DDP_RUN_DIR": "/r", "DDP_CHECKPOINT_DIR": "/c"}, {"DDP_CHECKPOINT_DIR": "/c"}),
        ({"PET_RUN_PATH": "1"}, {"PET_RUN_PATH": None, "TORCHELASTIC_RESTART_COUNT": "0"}),
        ({"DDP_PUSHGATEWAY": "a:1", "DDP_METRICS_PORT": "9"}, {"DDP_PUSHGATEWAY": None, "DDP_METRICS_PORT": None}),
    ],
)
def test_the_ranks_are_told_the_interface_what_to_record_and_their_programs_unless_the_user_has(base, expected):
    env = environment_of_a_rank(base)
    assert {name: env.get(name) for name in expected} == expected


def test_a_difference_names_both_values():
    first = {"torch": "2.15.0", "image": "train:1", "python": "3.11.7"}
    assert node_facts.differences(first, first, 2) == ""
    other = {"torch": "2.13.0", "image": "none", "python": "3.11.7", "sha256 of a.yaml": "a6a5452e568e"}
    difference = node_facts.differences(other, first, 2)
    assert [part.partition(" is ")[0] for part in difference.split("; ")] == ["torch", "image", "sha256 of a.yaml"]
    for value in ("2.13.0 on node 2", "2.15.0 on node 0", "train:1 on node 0", "a6a5452e568e on node 2"):
        assert value in difference


@pytest.mark.parametrize(
    ("own", "firsts", "named"),
    [
        pytest.param(["--lr", "0.1"], ["--lr", "0.1"], "", id="same"),
        pytest.param(["--lr", "0.2"], ["--lr", "0.1"], "--lr", id="option"),
        pytest.param(["a", "c"], ["a", "b"], "argument 2", id="argument"),
        pytest.param(
            ["--node_rank", "2", "--master-addr=c", "-x"],
            ["--node_rank", "0", "--master-addr=a", "-x"],
            "",
            id="placement",
        ),
    ],
)
@pytest.mark.parametrize("script", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_an_argument_that_differs_is_named_unless_it_is_for_placement(own, firsts, named, script):
    def command(arguments):
        return node_config.read_config(options.parse([*script, *arguments]), {}, lambda _: 1).command

    difference = node_facts.differing_argument(command(own), node_facts.argument_hashes(command(firsts)), 2)
    assert bool(difference) == bool(named)
    assert named in difference
