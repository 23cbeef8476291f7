"""More rows of what is refused by name in flags and variables."""

import sys
from pathlib import Path

import pytest
from tests.unit.ddprun import test_node_config
from tests.unit.ddprun.test_launchers import place
from tests.unit.ddprun.test_node_config import TWO, read

from ddprun.settings import node_config
from ddprun.system.errors import NodeError


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--nnodes", "0"], {}, "--nnodes '0'"),
        ([], TWO | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK '-1'"),
        (["--grace", "1e10"], {}, "--grace '1e10'"),
        (["--join-timeout", "nan"], {}, "--join-timeout 'nan'"),
        (["--local-ranks-filter", "0,"], {}, "--local-ranks-filter '0,'"),
        (["--debug-rank", "-1"], {}, "--debug-rank '-1'"),
        (["--debug-rank", "8"], {}, "--debug-rank '8'"),
    ],
)
def test_a_value_out_of_range_is_refused(argv, environ, named):
    with pytest.raises(NodeError) as caught:
        read(argv, environ)
    assert (caught.value.outcome.code, caught.value.outcome.cause) == (78, "config")
    assert [word for word in named.split() if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("argv", "environ", "differs"),
    [
        ([], {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}, {}),
        (
            ["--rdzv-conf", "is_host=1,join_timeout=90,read_timeout=3", "--nnodes", "2", "--local_addr", "10.0.0.1"],
            {"PET_RDZV_ENDPOINT": "[fd00::1]:5000", "PET_LOG_DIR": "/logs", "PET_STANDALONE": ""},
            place("fd00::1", 5000, join_timeout_s=90.0, local_addr="10.0.0.1", run_dir=Path("/logs")),
        ),
        (
            ["--nnodes", "2", "--node-rank", "0"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4001"},
            {"min_nodes": 2, "max_nodes": 2, "master_port": 4001},
        ),
        (["--no-python"], {}, {"command": ("train.py",), "forks": False}),
        ([], {"PET_NO_PYTHON": "1"}, {"command": ("train.py",), "forks": False}),
        (["--run-path"], {}, {"command": (sys.executable, "-m", "ddprun.run_path", "train.py")}),
        (["--role", "trainer"], {"PET_VIRTUAL_LOCAL_RANK": "1"}, {"role": "trainer", "virtual_local_rank": True}),
        (
            ["--local_ranks_filter", "0,1", "--nproc-per-node", "3"],
            {"PET_REDIRECTS": "0:3,1:1"},
            {"local_world_size": 3, "shown_local_ranks": frozenset({1})},
        ),
        (["--redirects", "3", "--tee", "3"], {}, {}),
        (["--teardown-timeout", "9"], {}, {}),
        (["--stop-signal", "USR1", "--setup-timeout", "5"], {}, {"stop_signal": 10, "setup_timeout_s": 5.0}),
        (["--shutdown-timeout", "7"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, {"grace_s": 7.0}),
        (
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1"],
            {},
            place("10.0.0.1", 29400, node_rank=node_config.UNNUMBERED),
        ),
        (
            ["--rdzv-conf", "is_host=0"],
            {"PET_NNODES": "1:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "[fd00::1]:5000"},
            place("fd00::1", 5000, nodes=(1, 2), node_rank=node_config.UNNUMBERED, may_host=False),
        ),
        (["--no-prefix"], {}, {"no_prefix": True}),
        ([], {"PET_LOCAL_RANKS_FILTER": "0"}, {"shown_local_ranks": frozenset({0})}),
    ],
)
def test_flags_and_variables_become_the_config(argv, environ, differs):
    test_node_config.test_flags_and_variables_become_the_config(argv, environ, differs)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {"PET_NNODES": "2:"}, "PET_NNODES '2:'"),
        (["--nnodes", "3:2"], {}, "--nnodes '3:2'"),
        (["--nnodes=2", "--rdzv-backend=static", "--rdzv-endpoint=a:1"], {}, "--node-rank PET_NODE_RANK"),
        (["--nnodes=2", "--rdzv-backend=c10d"], {}, "--master-addr PET_MASTER_ADDR"),
        (["--node-rank", "1"], {}, "--node-rank 1"),
        ([], {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "4000"}, "--master-addr PET_MASTER_ADDR"),
        ([], TWO | {"PET_MASTER_PORT": "0"}, "PET_MASTER_PORT 65535"),
        ([], TWO | {"PET_MASTER_PORT": "65536"}, "PET_MASTER_PORT '65536'"),
        (["--nproc-per-node", "x"], {}, "--nproc-per-node 'x'"),
        (["--nproc-per-node", "gpu"], {}, "--nproc-per-node 'gpu'"),
        (["--rdzv-endpoint", "host"], {}, "--rdzv-endpoint 'host'"),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-3"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT '-3'"),
        ([], {"DDP_DEADLINE": "35"}, "DDP_DEADLINE 35 --grace"),
        (["--checkpoint-copies", "0"], {}, "--checkpoint-copies '0'"),
        (["--spares", "1", "--nnodes", "1:3"], TWO, "--spares 1:3"),
        (["--spares", "1", "--nnodes", "3", "--node-rank", "4"], TWO, "4 --node-rank 3"),
        ([], {"DDP_METRICS_PORT": "http"}, "DDP_METRICS_PORT 'http'"),
        (["--rdzv-conf", "is_host=maybe"], {}, "--rdzv-conf is_host=maybe"),
        ([], {"PET_STANDALONE": "1", "PET_NNODES": "2"}, "PET_STANDALONE PET_NNODES"),
        ([], {"DDP_NODES_HERE": "0"}, "DDP_NODES_HERE '0'"),
        (["--local-ranks-filter", "first"], {}, "--local-ranks-filter 'first'"),
        ([], {"PET_LOCAL_RANKS_FILTER": "0,2", "PET_NPROC_PER_NODE": "2"}, "PET_LOCAL_RANKS_FILTER '0,2'"),
        (["--tee", "0:3;1:3"], {}, "--tee '0:3;1:3'"),
        (
            ["--virtual-local-rank", "--nproc-per-node=2"],
            {"CUDA_VISIBLE_DEVICES": "3"},
            "--virtual-local-rank CUDA_VISIBLE_DEVICES=3",
        ),
        (["--grace", "soon"], {}, "--grace 'soon'"),
        (["--join-timeout", "-1"], {}, "--join-timeout '-1'"),
        (["--max-restarts", "many"], {}, "--max-restarts 'many'"),
        (["--redirects", "4"], {}, "--redirects '4'"),
        (["--pushgateway", "over there"], {}, "--pushgateway 'over there'"),
    ],
)
def test_a_contradictory_configuration_is_refused(argv, environ, named):
    test_node_config.test_a_contradictory_configuration_is_refused(argv, environ, named)
