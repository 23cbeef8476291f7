"""Ranks and GPUs of a node on every target: the ranks are what ddprun starts, the GPUs what the target asks for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl import test_ranks
from tests.unit.ddpctl.records import run_of
from tests.unit.ddpctl.test_ranks import ELASTIC_PODS, JOB, PODS, plan_of

from ddpctl.errors import UsageError
from ddpctl.job.launch_plan import title, unused_gpus
from ddpctl.job.spec import JobSpec
from ddpctl.notebook import launch
from ddpctl.runs import run_store
from ddpctl.targets import LogQuery


@pytest.mark.parametrize(("ranks", "world_size"), [(1, 2), (2, 4), (4, 8), (None, 8)])
def test_the_world_is_nodes_times_ranks(ranks: int | None, world_size: int) -> None:
    job = replace(JOB, ranks=ranks)
    assert plan_of(job).job.world_size == world_size
    assert title(job).startswith(f"2 nodes x {world_size // 2} rank")


def test_a_log_is_looked_for_on_the_node_of_its_rank() -> None:
    run = run_of(job=replace(JOB, ranks=2))
    assert LogQuery(ranks=(1, 2, 3)).files(run) == {
        0: {"rank-1.log": "[node0 rank1] "},
        1: {"rank-2.log": "[node1 rank2] ", "rank-3.log": "[node1 rank3] "},
    }


def test_a_record_of_a_version_without_ranks_has_one_for_each_gpu(tmp_path: Path) -> None:
    run_store.create(tmp_path, "night")
    run_store.save(run_of(job=JOB, folder=str(tmp_path / "night")))
    file = tmp_path / "night" / "run.json"
    record = json.loads(file.read_text())
    assert record["job"].pop("ranks", "missing") is None
    file.write_text(json.dumps(record))
    assert run_store.load(tmp_path, "night").job == JOB


@pytest.mark.parametrize(
    "job",
    [replace(JOB, ranks=1, command=(), device="cpu"), replace(JOB, ranks=4, command=()), replace(JOB, ranks=1)],
    ids=["cpu", "a rank a GPU", "a script of one's own"],
)
def test_nothing_is_said_of_gpus_that_may_be_used(job: JobSpec) -> None:
    assert unused_gpus(job) == ""


@pytest.mark.parametrize(("ranks", "expected"), [(3, "gpus (4)"), (0, "1 to 64")])
def test_a_notebook_s_ranks_divide_its_gpus(ranks: int, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        launch("train.py", gpus=4, ranks=ranks)
    assert [fact for fact in ("ranks", str(ranks), expected) if fact not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        ("${HOME}/lib", True),
        ("/x:~/lib", True),
        ("$5", False),
        ("$", False),
        ("a~/b", False),
    ],
)
def test_a_value_that_only_a_shell_would_expand_is_named(value, *, warns):
    test_ranks.test_a_value_that_only_a_shell_would_expand_is_named(value, warns=warns)


@pytest.mark.parametrize(
    ("word", "job", "given", "master", "port"),
    [
        ("pytorchjob", replace(PODS, port=4000), {}, "digits-otter-worker-0", 4000),
        ("pytorchjob", replace(PODS, port=4000), {"master": True}, "digits-otter-master-0", 4000),
        ("pytorchjob", ELASTIC_PODS, {}, "digits-otter-worker-0", 23456),
    ],
)
def test_every_pod_has_its_node_rank_and_settings(word, job, given, master, port):
    test_ranks.test_every_pod_has_its_node_rank_and_settings(word, job, given, master, port)


@pytest.mark.parametrize(
    ("text", "flags", "fact"),
    [
        (None, {"ranks": "2"}, "--ranks: gpus (1)"),
        ("job: {gpus: 4, ranks: 2}\n", {"gpus": "3"}, "ddpctl.yaml:1:23: ranks: gpus (3)"),
    ],
    ids=["ranks alone", "a flag over the file"],
)
def test_ranks_that_do_not_divide_the_gpus(text, flags, fact, tmp_path, monkeypatch):
    test_ranks.test_ranks_that_do_not_divide_the_gpus(text, flags, fact, tmp_path, monkeypatch)
