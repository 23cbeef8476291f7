"""Flags and environment become one contract; what contradicts is refused by name, in one whole line."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ddprun import contract, options
from ddprun.errors import NodeError

TWO = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "10.0.0.1",
    "PET_MASTER_PORT": "4000",
    "PET_NPROC_PER_NODE": "4",
}
ALONE = {
    "command": (sys.executable, "train.py"),
    "forks": sys.platform == "linux",
    "min_nodes": 1,
    "max_nodes": 1,
    "nproc": 1,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 0,
    "run_id": "none",
    "run_dir": None,
    "checkpoint_dir": None,
    "max_restarts": 1000,
    "numa_binding": None,
    "hang_timeout_s": 300.0,
    "grace_s": 30.0,
    "deadline": None,
    "join_timeout_s": 30.0,
    "metrics_host": None,
    "metrics_port": 0,
    "targets_dir": None,
    "launcher": "ddprun",
    "pushgateway": None,
    "nodes_here": 1,
    "lifeline_fd": None,
    "local_addr": None,
    "patient": False,
    "check_only": False,
}


def read(argv, environ, gpus=0):
    counts = {"gpu": gpus, "cpu": 6}
    return contract.read(options.parse([*argv, "train.py"]), environ, counts.__getitem__)


@pytest.mark.parametrize(
    ("argv", "environ", "differs"),
    [
        ([], {}, {}),
        ([], {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}, {}),
        (
            ["--rdzv-conf", "is_host=1,join_timeout=90,read_timeout=3", "--nnodes", "2", "--local_addr", "10.0.0.1"],
            {"PET_RDZV_ENDPOINT": "[fd00::1]:5000", "PET_LOG_DIR": "/logs", "PET_STANDALONE": ""},
            {
                "min_nodes": 2,
                "max_nodes": 2,
                "master_addr": "fd00::1",
                "master_port": 5000,
                "join_timeout_s": 90.0,
                "local_addr": "10.0.0.1",
                "run_dir": Path("/logs"),
            },
        ),
        (
            [],
            TWO,
            {
                "min_nodes": 2,
                "max_nodes": 2,
                "nproc": 4,
                "node_rank": 1,
                "master_addr": "10.0.0.1",
                "master_port": 4000,
                "join_timeout_s": 60.0,
            },
        ),
        (
            ["--nnodes=1:3", "--node_rank", "2", "--nproc_per_node=2", "--rdzv-endpoint", "10.0.0.2:5000"],
            TWO,
            {
                "min_nodes": 1,
                "max_nodes": 3,
                "nproc": 2,
                "node_rank": 2,
                "master_addr": "10.0.0.2",
                "master_port": 5000,
                "join_timeout_s": 60.0,
            },
        ),
        (
            ["--nnodes", "2", "--node-rank", "0"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4001"},
            {"min_nodes": 2, "max_nodes": 2, "master_port": 4001},
        ),
        (["--standalone"], TWO, {"nproc": 4}),
        (["--nproc-per-node", "auto"], {}, {"nproc": 6}),
        (["-m"], {}, {"command": (sys.executable, "-m", "train.py")}),
        (["--no-python"], {}, {"command": ("train.py",), "forks": False}),
        (["--exec"], {}, {"forks": False}),
        (
            ["--max-restarts", "3", "--grace", "5", "--join-timeout", "0.5", "--rdzv-id", "x"],
            {"DDP_RUN_ID": "y", "DDP_RUN_DIR": "/runs/a", "DDP_METRICS_PORT": "9400", "DDP_LIFELINE_FD": "7"},
            {
                "max_restarts": 3,
                "grace_s": 5.0,
                "join_timeout_s": 0.5,
                "run_id": "x",
                "run_dir": Path("/runs/a"),
                "metrics_port": 9400,
                "lifeline_fd": 7,
            },
        ),
    ],
)
def test_what_is_said_becomes_the_contract(argv, environ, differs):
    assert asdict(read(argv, environ)) == ALONE | differs


def test_auto_counts_gpus_unless_the_device_is_the_cpu():
    assert read(["--nproc-per-node", "auto"], {}, gpus=8).nproc == 8
    assert read(["--nproc-per-node", "auto"], {"DDP_DEVICE": "cpu"}, gpus=8).nproc == 6


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--nnodes", "two"], {}, "--nnodes is 'two': a number of nodes, or MIN:MAX, is allowed, as 2 or 1:4"),
        ([], {"PET_NNODES": "2:"}, "PET_NNODES is '2:': a number of nodes, or MIN:MAX, is allowed, as 2 or 1:4"),
        (["--nnodes", "3:2"], {}, "--nnodes is '3:2': at least 1 node, and MIN not above MAX, is allowed"),
        (["--nnodes", "0"], {}, "--nnodes is '0': at least 1 node, and MIN not above MAX, is allowed"),
        (
            ["--nnodes", "2"],
            {},
            "2 nodes, and which one this is was not said: give --node-rank or PET_NODE_RANK, 0 to 1",
        ),
        ([], TWO | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2, but the job has 2 nodes: 0 to 1 is allowed"),
        (["--node-rank", "1"], {}, "--node-rank is 1, but the job has 1 node: only 0 is allowed"),
        ([], TWO | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK is '-1': a whole number from 0 is allowed"),
        (
            [],
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "4000"},
            "2 nodes, and the address of node 0 was not said: "
            "give --master-addr or PET_MASTER_ADDR, the same on every node",
        ),
        (
            [],
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1"},
            "2 nodes, and a free port of node 0 was not said: "
            "give --master-port or PET_MASTER_PORT, the same on every node",
        ),
        (
            [],
            TWO | {"PET_MASTER_PORT": "0"},
            "PET_MASTER_PORT is 0, but 2 nodes must know the port: 1 to 65535",
        ),
        (
            [],
            TWO | {"PET_MASTER_PORT": "65536"},
            "PET_MASTER_PORT is '65536': a port from 1 to 65535, or 0 for a free one, is allowed",
        ),
        (["--nproc-per-node", "x"], {}, "--nproc-per-node is 'x': a whole number from 0, auto, gpu or cpu is allowed"),
        (["--nproc-per-node", "0"], {}, "--nproc-per-node is 0: at least 1 rank a node is allowed"),
        (
            ["--nproc-per-node", "gpu"],
            {},
            "--nproc-per-node is 'gpu', but this node has no GPU: a number, auto or cpu is allowed",
        ),
        (
            ["--standalone", "--nnodes", "2"],
            {},
            "--standalone is one node, but --nnodes is 2: give one of the two",
        ),
        (["--rdzv-endpoint", "host"], {}, "--rdzv-endpoint is 'host': HOST:PORT is what it takes"),
        (["--grace", "soon"], {}, "--grace is 'soon': a number of seconds from 0 to 100000000 is allowed"),
        (
            ["--deadline", "soon"],
            {},
            "--deadline is 'soon': seconds from the start, or a time as 2030-01-31T08:00:00+00:00, is allowed",
        ),
        (
            [],
            {"DDP_DEADLINE": "35"},
            "DDP_DEADLINE is 35, but ranks get 30 s to save, and ddprun needs 5 s more: "
            "give more than 35, or a shorter --grace",
        ),
        (["--grace", "1e10"], {}, "--grace is '1e10': a number of seconds from 0 to 100000000 is allowed"),
        (["--join-timeout", "-1"], {}, "--join-timeout is '-1': a number of seconds from 0 to 100000000 is allowed"),
        (["--join-timeout", "nan"], {}, "--join-timeout is 'nan': a number of seconds from 0 to 100000000 is allowed"),
        (["--max-restarts", "many"], {}, "--max-restarts is 'many': a whole number from 0 is allowed"),
        (
            [],
            {"DDP_METRICS_PORT": "http"},
            "DDP_METRICS_PORT is 'http': a port from 1 to 65535, or 0 for a free one, is allowed",
        ),
        (
            ["--rdzv-conf", "is_host=true", "--node-rank", "1", "--nnodes", "2"],
            {},
            "--rdzv-conf says is_host, but --node-rank is 1: node 0 is the host, give one",
        ),
        (
            [],
            {"PET_STANDALONE": "1", "PET_NNODES": "2"},
            "PET_STANDALONE is one node, but PET_NNODES is 2: give one of the two",
        ),
        ([], {"DDP_NODES_HERE": "0"}, "DDP_NODES_HERE is '0': a whole number from 1 is allowed"),
        ([], {"DDP_LIFELINE_FD": "x"}, "DDP_LIFELINE_FD is 'x': the number of an open descriptor is allowed"),
    ],
)
def test_what_contradicts_is_refused_by_name(argv, environ, message):
    with pytest.raises(NodeError) as caught:
        read(argv, environ)
    assert (str(caught.value), caught.value.outcome.code) == (message, 78)


def test_torchruns_other_flags_are_taken_and_said_to_change_nothing():
    argv = ["-r", "3", "--tee", "3", "--start_method", "spawn", "--monitor-interval=1", "--role", "trainer", "train.py"]
    assert options.accepted(options.parse(argv)) == (
        "--monitor-interval changes nothing here: a rank's end is noticed at once",
        "--start-method changes nothing here: the ranks are started as ddprun does it",
        "--role changes nothing here: all ranks have the role 'default'",
        "--redirects changes nothing here: every rank's output goes to the console and to a log of its own",
        "--tee changes nothing here: every rank's output goes to the console and to a log of its own",
    )


def test_an_unknown_flag_is_one_line_with_what_was_meant(capsys):
    with pytest.raises(SystemExit) as left:
        options.parse(["--nproc=2", "train.py"])
    told = "ddprun: unrecognized arguments: --nproc=2 (did you mean --nproc-per-node?); see ddprun --help\n"
    assert (left.value.code, *capsys.readouterr()) == (2, "", told)


@pytest.mark.parametrize(
    ("argv", "script", "arguments"),
    [
        (["--check-only"], "", []),
        (["--check-only", "train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        (["train.py", "--check-only"], "train.py", ["--check-only"]),
    ],
)
def test_a_check_needs_no_script(argv, script, arguments):
    asked = options.parse(argv)
    assert (asked.script, asked.script_args) == (script, arguments)
    assert asked.check_only == (argv[0] == "--check-only")
