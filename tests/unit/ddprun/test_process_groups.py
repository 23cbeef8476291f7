"""Which places ranks may claim when they create a process group, and the file in which they meet."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from bench.measuring import free_port
from tests.messages import refused

from ddprun.ranks.process_groups import DebugStore, RankPlace


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "DDP_RUN_ID": "night",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "night",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def place(rank: int, claims: Path, attempt: int = 1) -> RankPlace:
    return RankPlace(
        rank=str(rank), pid=os.getpid(), store_port="29500", run_id="night", claims=claims, attempt=attempt
    )


@pytest.mark.usefixtures("environment")
def test_two_ranks_that_join_as_the_same_rank_are_both_named(tmp_path: Path) -> None:
    """Under Slurm, each rank of a node sees the node's SLURM_PROCID."""
    ranks = [place(rank, tmp_path) for rank in (0, 1)]
    assert ranks[0].check("env://", 0, 2) == "env://"
    with refused(RuntimeError, "ranks 0 and 1", "rank 0 of 2"):
        ranks[1].check("env://", 0, 2)


@pytest.mark.usefixtures("environment")
def test_ranks_may_exchange_their_places_in_a_later_group(tmp_path: Path) -> None:
    rank = place(0, tmp_path)
    for number in (0, 1, 0):
        rank.check("env://", number, 2)
    assert len({*tmp_path.iterdir()}) == 3
    for number in (0, 1):  # each rank has groups of its own
        place(number, tmp_path).check("env://", 0, 1)
    assert len({*tmp_path.iterdir()}) == 3


@pytest.mark.parametrize(("attempt", "suffix"), [(1, ""), (2, ".night.attempt-2")])
@pytest.mark.usefixtures("environment")
def test_a_later_attempt_meets_in_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attempt: int, suffix: str
) -> None:
    urls = {place(rank, tmp_path, attempt).check(f"file://{tmp_path}/meet?a=1", rank, 2) for rank in (0, 1)}
    assert urls == {f"file://{tmp_path}/meet{suffix}?a=1"}
    assert capsys.readouterr().err.count(f"{tmp_path}/meet.night") == (attempt > 1)


def test_a_debug_server_and_the_process_group_of_a_single_rank_share_the_store(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, finder = free_port(), DebugStore()
    monkeypatch.setenv("MASTER_PORT", str(port))
    finder.find_spec("torch.distributed.debug._store")
    finder.find_spec("torch.distributed.debug")
    dist.TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
    assert dist.TCPStore("127.0.0.1", port, 1, True, multi_tenant=True).get("key") == b"value"  # as a group makes it
