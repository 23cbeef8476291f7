"""The notations of Slurm's lists."""

import pytest
from tests.unit.ddprun import test_launchers
from tests.unit.ddprun.test_launchers import ALONE_ON_SLURM, ELASTIC, ON_SLURM, SLURM

from ddprun.settings import launchers


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu08", "gpu07"),
        ("gpu[07-09,12],x1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("rack[1-2]n[05,07].site", "rack1n05.site"),
        ("a-b[3]", "a-b3"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert launchers.first_host(nodes) == first


def test_the_tasks_of_slurms_nodes():
    assert launchers.slurm_tasks("2(x3),1,4(x2)") == (2, 2, 2, 1, 4, 4)


@pytest.mark.parametrize(
    ("argv", "environ", "differs"),
    [
        ([], {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "outer"}, {}),
        ([], SLURM | {"RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "stale"}, ON_SLURM),
        ([], SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": ""}, ON_SLURM),
        ([], SLURM | {"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, {"local_world_size": 4, **ALONE_ON_SLURM}),
        (
            [],
            {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"},
            {"local_world_size": 2, "slurm_job": "7", "by_hand": False},
        ),
        ([], {"JOB_COMPLETION_INDEX": "2"}, {}),
    ],
)
def test_the_variables_of_a_launcher_become_the_place_of_a_node(argv, environ, differs, monkeypatch):
    test_launchers.test_the_variables_of_a_launcher_become_the_place_of_a_node(argv, environ, differs, monkeypatch)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}, "RANK 4"),
        ([], {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK"),
        ([], SLURM | {"SLURM_NODEID": "x"}, "SLURM_NODEID 'x'"),
        ([], ELASTIC | {"HOSTNAME": "bert-worker-3"}, "HOSTNAME 3"),
    ],
)
def test_contradictory_variables_of_a_launcher_are_refused(argv, environ, named):
    test_launchers.test_contradictory_variables_of_a_launcher_are_refused(argv, environ, named)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (
            [],
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_TASK": "1"},
            "SLURM_GPUS_PER_TASK --ntasks-per-node=1",
        ),
    ],
)
def test_gpus_of_a_task_contradict_several_tasks(argv, environ, named):
    test_launchers.test_contradictory_variables_of_a_launcher_are_refused(argv, environ, named)
