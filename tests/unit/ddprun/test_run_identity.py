"""A run's id: its launcher's, or one that all nodes and all starts of a run make alike, and no other run."""

import re

import pytest

from ddprun.files import run_identity
from ddprun.settings import node_config, options

HOST = {"PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500", "DDP_RUN_ID": "night"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_USER": "bob", "SLURM_JOB_ACCOUNT": "vision"}


def identity(environ: dict[str, str], *flags: str) -> tuple[str, dict[str, str]]:
    config = node_config.read_config(options.parse([*flags, "train.py"]), environ, lambda _: 1)
    return run_identity.make_uid(config, environ), run_identity.owner(config, environ)


def test_the_launchers_id_is_taken_as_it_is() -> None:
    given = {"DDP_RUN_UID": "0a1b2c3d4e5f", "DDP_USER": "ann", "DDP_PROJECT": "speech", **SLURM}
    assert identity(given) == ("0a1b2c3d4e5f", {"user": "ann", "project": "speech"})


def test_the_nodes_of_a_run_agree_without_having_met() -> None:
    first, second = (identity({**HOST, "PET_NODE_RANK": rank})[0] for rank in "01")
    assert first == second
    assert re.fullmatch("[0-9a-f]{12}", first)


@pytest.mark.parametrize("change", [{"PET_MASTER_PORT": "29501"}, {"PET_MASTER_ADDR": "h"}, {"DDP_RUN_ID": "day"}])
def test_another_address_or_name_is_another_run(change: dict[str, str]) -> None:
    node = {**HOST, "PET_NODE_RANK": "1"}
    assert identity(node)[0] != identity({**node, **change})[0]


def test_a_slurm_job_that_is_requeued_on_other_nodes_is_the_same_run() -> None:
    node = {**HOST, **SLURM, "PET_NODE_RANK": "1"}
    assert identity(node) == identity({**node, "PET_MASTER_ADDR": "10.0.0.9", "SLURM_RESTART_COUNT": "1"})
    assert identity(node)[1] == {"user": "bob", "project": "vision"}
    assert identity(node)[0] != identity({**node, "SLURM_JOB_ID": "4712"})[0]


def test_a_single_node_is_a_new_run_at_each_start_unless_its_folder_and_name_recur() -> None:
    assert identity({})[0] != identity({})[0]
    assert identity({"DDP_RUN_ID": "night"})[0] != identity({"DDP_RUN_ID": "night"})[0]
    assert identity({}, "--run-dir", "/runs/a")[0] != identity({}, "--run-dir", "/runs/a")[0]
    named = {"DDP_RUN_ID": "night"}
    assert identity(named, "--run-dir", "/runs/a")[0] == identity(named, "--run-dir", "/runs/a")[0]
    assert identity(named, "--run-dir", "/runs/a")[0] != identity(named, "--run-dir", "/runs/b")[0]


def test_the_user_of_a_pod_is_not_known() -> None:
    assert identity({"KUBERNETES_SERVICE_HOST": "10.96.0.1"})[1]["user"] == ""
