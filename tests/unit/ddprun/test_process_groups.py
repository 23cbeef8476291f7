"""Which places ranks may claim when they create a process group, and the file in which they meet."""

import os
from pathlib import Path

import pytest
from tests.messages import refused

from ddprun.ranks.process_groups import RankPlace


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


@pytest.mark.parametrize(("attempt", "suffix"), [(1, ""), (2, ".night.attempt-2")])
@pytest.mark.usefixtures("environment")
def test_a_later_attempt_meets_in_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attempt: int, suffix: str
) -> None:
    urls = {place(rank, tmp_path, attempt).check(f"file://{tmp_path}/meet?a=1", rank, 2) for rank in (0, 1)}
    assert urls == {f"file://{tmp_path}/meet{suffix}?a=1"}
    assert capsys.readouterr().err.count(f"{tmp_path}/meet.night") == (attempt > 1)
