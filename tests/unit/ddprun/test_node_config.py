"""Flags and environment become one contract, or are refused by name; a run's id, and its end from outside."""

import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddprun.test_launchers import SLURM as STEP
from tests.unit.ddprun.test_launchers import place

from ddprun.files import run_identity
from ddprun.settings import node_config, node_facts, options
from ddprun.settings.node_config import Deadline
from ddprun.system.errors import NodeError
from ddpwire.run_files import NOTICE_EVENTS

TWO = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "4000",
    "PET_NPROC_PER_NODE": "4",
}  # fmt: skip
ALONE = {
    "command": (sys.executable, "train.py"), "forks": sys.platform == "linux", "min_nodes": 1, "max_nodes": 1,
    "local_world_size": 1, "slurm_job": None, "slurm_step": "", "restarts_errors": False, "num_requeues": 0,
    "node_rank": 0, "may_host": True, "spans_machines": False, "master_addr": "127.0.0.1", "master_port": 0,
    "spares": 0, "spare": None,
    "run_id": "none", "run_dir": None, "checkpoint_dir": None, "resumes": "", "checkpoint_copies": 1,
    "max_restarts": 1000, "numa_binding": None, "hang_timeout_s": 300.0, "grace_s": 30.0, "deadline": None,
    "stop_signal": 15, "node_setup": (), "node_teardown": (), "notify": (),
    "notify_on": NOTICE_EVENTS, "setup_timeout_s": 1800.0, "teardown_timeout_s": 0.0,
    "join_timeout_s": 30.0, "metrics_host": None,
    "metrics_port": 0, "targets_dir": None, "launcher": "ddprun", "pushgateway": None, "nodes_here": 1,
    "by_hand": True, "lifeline_fd": None, "secret": b"", "local_addr": None, "retries_network": False,
    "is_replaced": False, "one_port": False, "check_only": False, "shown_local_ranks": None, "no_prefix": False,
    "debug_rank": None, "role": "default", "virtual_local_rank": False,
}  # fmt: skip


def read(argv, environ, gpus=0):
    counts = {"gpu": gpus, "cpu": 6}
    return node_config.read_config(options.parse([*argv, "train.py"]), environ, counts.__getitem__)


@pytest.mark.parametrize(
    ("argv", "environ", "differs"),
    [
        ([], {}, {}),
        ([], TWO, place("10.0.0.1", 4000, local_world_size=4, node_rank=1)),
        (
            ["--nnodes=1:3", "--node_rank", "2", "--nproc_per_node=2", "--rdzv-endpoint", "10.0.0.2:5000"],
            TWO,
            place("10.0.0.2", 5000, nodes=(1, 3), local_world_size=2, node_rank=2),
        ),
        (["--standalone"], TWO, {"local_world_size": 4}),
        (["--nproc-per-node", "auto"], {}, {"local_world_size": 6}),
        (["-m"], {}, {"command": (sys.executable, "-m", "train.py")}),
        (
            ["-r", "3", "--nproc-per-node", "2", "--tee", "1:3"],
            {},
            {"local_world_size": 2, "shown_local_ranks": frozenset({1})},
        ),
        (["--exec"], {}, {"forks": False}),
        (
            ["--node-setup", "a", "--node_setup", "b", "--node-teardown", "c", "--teardown-timeout", "9"],
            {},
            {"node_setup": ("a", "b"), "node_teardown": ("c",), "teardown_timeout_s": 9.0},
        ),
        (["--notify", "$A", "--notify-on", "hang,failed"], {}, {"notify": ("$A",), "notify_on": ("hang", "failed")}),
        ([], {"PET_SHUTDOWN_TIMEOUT": "5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, {"grace_s": 5.0}),
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]", "--node-rank=1"],
            {"PET_NNODES": "2"},
            place("fd00::1", 29400, node_rank=1),
        ),
        (
            ["--local-ranks-filter", "0,2", "--nproc-per-node", "3"],
            {"PET_LOCAL_RANKS_FILTER": "1"},
            {"local_world_size": 3, "shown_local_ranks": frozenset({0, 2})},
        ),
        (["--debug-rank", "0"], {}, {"debug_rank": 0, "hang_timeout_s": 0.0}),
        (["--debug-rank", "0", "--hang-timeout", "60"], {}, {"debug_rank": 0, "hang_timeout_s": 60.0}),
        (
            ["--max-restarts", "3", "--grace", "5", "--join-timeout", "0.5", "--rdzv-id", "x"],
            {"DDP_RUN_ID": "y", "DDP_RUN_DIR": "/runs/a", "DDP_METRICS_PORT": "9400", "DDP_LIFELINE_FD": "7"},
            {
                "max_restarts": 3,
                "restarts_errors": True,
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
def test_flags_and_variables_become_the_config(argv, environ, differs):
    assert asdict(read(argv, environ)) == ALONE | differs


@pytest.mark.parametrize(
    ("command", "is_script"),
    [((), False), (("-m",), False), (("-c", "x"), False), (("-u", "a.py"), False), (("-m", "json.tool"), True)],
)
def test_a_python_of_its_own_options_or_without_a_script_is_executed_and_hashed(command, is_script):
    config = node_config.read_config(options.parse(["--no-python", "--", sys.executable, *command]), {}, lambda _: 1)
    assert config.forks is (is_script and sys.platform == "linux")
    node_config.check_program(config)  # raises nothing
    assert len(node_facts.config_sha256(config.command)) == 12


def test_auto_counts_gpus_unless_the_device_is_the_cpu():
    assert read(["--nproc-per-node", "auto"], {}, gpus=8).local_world_size == 8
    assert read(["--nproc-per-node", "auto"], {"DDP_DEVICE": "cpu"}, gpus=8).local_world_size == 6


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--nnodes", "two"], {}, "--nnodes 'two'"),
        (["--nnodes", "2"], {}, "--node-rank PET_NODE_RANK"),
        ([], TWO | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK 2"),
        ([], {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1"}, "--master-port PET_MASTER_PORT"),
        (["--nproc-per-node", "0"], {}, "--nproc-per-node 0"),
        (["--standalone", "--nnodes", "2"], {}, "--standalone --nnodes"),
        (["--deadline", "soon"], {}, "--deadline 'soon'"),
        (["--spares", "2"], TWO, "--spares 2 nodes"),
        (["--rdzv-conf", "is_host=true", "--node-rank", "1", "--nnodes", "2"], {}, "--rdzv-conf is_host --node-rank"),
        ([], {"DDP_LIFELINE_FD": "x"}, "DDP_LIFELINE_FD 'x'"),
        (["--debug-rank", "1"], {}, "--debug-rank '1'"),
        (["--notify", "Slack://token/channel"], {}, "--notify is an address"),
        (["--numa-binding", "cpu"], {}, "--numa-binding 'cpu'"),
        ([], {"RANK": "3"}, "RANK WORLD_SIZE"),
        (["--nproc-per-node", "4"], {"RANK": "1", "WORLD_SIZE": "2"}, "RANK WORLD_SIZE --nproc-per-node"),
        ([], {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}, "srun --nnodes"),
        (
            [],
            {"PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "bert-worker-1"},
            "--node-rank PET_NODE_RANK",
        ),
    ],
)
def test_a_contradictory_configuration_is_refused(argv, environ, named):
    with pytest.raises(NodeError) as caught:
        read(argv, environ)
    assert (caught.value.outcome.code, caught.value.outcome.cause) == (78, "config")
    assert [word for word in named.split() if word not in str(caught.value)] == []


def test_torchruns_other_flags_are_accepted_and_reported_as_without_effect():
    argv = ["-r", "0:1", "--tee", "3", "--start_method", "spawn", "--monitor-interval=1", "--rdzv-backend", "etcd"]
    argv += [
        "--duplicate-stdout-filters",
        "loss",
        "--duplicate-stderr-filters",
        "nan",
        "--logs-specs",
        "own",
        "train.py",
    ]
    notes = options.accepted(options.parse(argv), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert [match.group() for note in notes if (match := re.search(r"--[a-z-]+|TORCH\w+", note))] == [
        *("--monitor-interval", "--start-method", "--tee", "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
        *("--logs-specs", "--rdzv-backend", "--redirects", "TORCHELASTIC_ENABLE_FILE_TIMER"),
    ]


def test_an_unknown_flag_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(["--nproc=2", "train.py"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert "--nproc=2" in err
    assert "--nproc-per-node" in err


@pytest.mark.parametrize(
    ("argv", "script", "arguments"),
    [
        (["--check-only"], "", []),
        (["--check-only", "train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        (["train.py", "--check-only"], "train.py", ["--check-only"]),
    ],
)
def test_a_check_needs_no_script(argv, script, arguments):
    parsed = options.parse(argv)
    assert (parsed.script, parsed.script_args) == (script, arguments)
    assert parsed.check_only == (argv[0] == "--check-only")


@pytest.mark.parametrize("number", [0, 3])
def test_a_check_includes_the_spares(number):
    argv = ["--check-only", "--spares", "1", "--nnodes", "3", "--node-rank", str(number)]
    checked = read([*argv, "--master-addr", "10.0.0.1", "--master-port", "4000"], {})
    assert (checked.min_nodes, checked.max_nodes, checked.spares, checked.node_rank) == (4, 4, 0, number)
    assert not checked.is_spare


HOST = {"PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500", "DDP_RUN_ID": "night"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_USER": "bob", "SLURM_JOB_ACCOUNT": "vision"}


def identity(environ: dict[str, str], *flags: str) -> tuple[str, dict[str, str]]:
    config = node_config.read_config(options.parse([*flags, "train.py"]), environ, lambda _: 1)
    return run_identity.make_uid(config, environ), run_identity.owner(config, environ)


def test_the_nodes_of_a_run_agree_on_its_id_without_having_met() -> None:
    """Another address or name is another run, and a Slurm job that is requeued on other nodes is the same one."""
    first, node = ({**HOST, "PET_NODE_RANK": rank} for rank in "01")
    assert identity(first)[0] == identity(node)[0]
    assert re.fullmatch("[0-9a-f]{12}", identity(first)[0])
    for change in ({"PET_MASTER_PORT": "29501"}, {"PET_MASTER_ADDR": "h"}, {"DDP_RUN_ID": "day"}):
        assert identity(node)[0] != identity({**node, **change})[0]
    job = node | SLURM
    assert identity(job) == identity({**job, "PET_MASTER_ADDR": "10.0.0.9", "SLURM_RESTART_COUNT": "1"})
    assert identity(job)[0] != identity({**job, "SLURM_JOB_ID": "4712"})[0]


def test_a_single_node_is_a_new_run_at_each_start_unless_its_folder_and_name_recur() -> None:
    named = {"DDP_RUN_ID": "night"}
    for environ, flags in (({}, ()), (named, ()), ({}, ("--run-dir", "/runs/a"))):
        assert identity(environ, *flags)[0] != identity(environ, *flags)[0]
    assert identity(named, "--run-dir", "/runs/a")[0] == identity(named, "--run-dir", "/runs/a")[0]
    assert identity(named, "--run-dir", "/runs/a")[0] != identity(named, "--run-dir", "/runs/b")[0]


def test_the_id_and_the_owner_are_those_of_the_launcher_or_of_the_job() -> None:
    given = {"DDP_RUN_UID": "0a1b2c3d4e5f", "DDP_USER": "ann", "DDP_PROJECT": "speech", **SLURM}
    assert identity(given) == ("0a1b2c3d4e5f", {"user": "ann", "project": "speech"})
    assert identity({**HOST, **SLURM, "PET_NODE_RANK": "1"})[1] == {"user": "bob", "project": "vision"}
    assert identity({"KUBERNETES_SERVICE_HOST": "10.96.0.1"})[1]["user"] == "", "that of a pod is not known"


SLURM_END = {"SLURM_JOB_END_TIME": "1893456000"}


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, None),
        ("90", {}, Deadline(source="--deadline", at=1893450090)),
        ("2030-01-01T01:00:00+01:00", {}, Deadline(source="--deadline", at=1893456000)),
        (None, {"DDP_DEADLINE": "2030-01-01T00:00:00Z"}, Deadline(source="DDP_DEADLINE", at=1893456000)),
        (None, SLURM_END, Deadline(source="SLURM_JOB_END_TIME", at=1893456000, margin_s=30)),
        ("90", SLURM_END | {"DDP_DEADLINE": "80"}, Deadline(source="--deadline", at=1893450090)),
    ],
)
def test_the_deadline_is_that_of_the_flag_the_variable_or_slurm(
    flag: str | None, environ: dict[str, str], expected: Deadline | None
) -> None:
    assert node_config.read_deadline(flag, environ, grace_s=30, now=1893450000) == expected


@pytest.mark.parametrize(
    "text",
    [pytest.param("2029-12-31T23:59:00+00:00", id="over"), pytest.param("2030-01-01T00:00:20+00:00", id="too-soon")],
)
def test_a_deadline_that_is_too_early_to_save_is_refused(text: str) -> None:
    with pytest.raises(NodeError) as refused:
        node_config.read_deadline(text, {}, grace_s=30, now=1893456000)
    assert (refused.value.outcome.code, refused.value.outcome.cause) == (78, "config")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("after_s", "stops_after_s", "left_s"),
    [pytest.param(-50.0, 0.0, 0, id="over"), pytest.param(6.4, 0.5, 6, id="time")],
)
def test_a_stop_is_requested_one_grace_before_the_deadline(after_s: float, stops_after_s: float, left_s: int) -> None:
    lines: list[str] = []
    stop_times: list[float] = []
    now = time.time()
    deadline = Deadline(source="--deadline", at=now + after_s)
    node_config.watch_deadline(
        deadline, grace_s=0.9, request_stop=lambda: stop_times.append(time.time()), log=lines.append
    )
    until(lambda: stop_times)
    assert stop_times[0] - now > stops_after_s - 0.01
    assert seconds_left(lines) <= left_s


def seconds_left(lines: list[str]) -> int:
    """The seconds in the one line about the deadline; on a busy machine it comes later."""
    (line,) = lines
    (seconds,) = re.findall(r"(\d+) s:", line)
    return int(seconds)
