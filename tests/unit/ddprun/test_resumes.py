"""Which ranks resume from different checkpoints, and which only seem to."""

from typing import Any

import pytest

from ddprun.health.resumes import Resume, describe_differences, find_differences

LAST = {"last.pt": (1000, "a")}


def rank(number: int, files: dict[str, tuple[int, str]] | None = None, **facts: Any) -> Resume:
    """A rank of a run with two ranks a node."""
    return Resume(rank=number, node=number // 2, local_rank=number % 2, files=files or {}, **facts)


def groups(*resumes: Resume) -> list[list[int]]:
    return [[resume.rank for resume in group] for group in find_differences(resumes)]


def test_ranks_that_begin_at_different_steps_differ() -> None:
    ranks = rank(0, LAST, reported=261), rank(1, LAST, reported=261), rank(2, reported=0), rank(3, reported=0)
    assert groups(*ranks) == [[0, 1], [2, 3]]
    assert groups(rank(0, reported=0), rank(2, LAST, reported=261)) == [[2], [0]]
    assert groups(rank(0, LAST, reported=261), rank(1, LAST, reported=200), rank(2, reported=0)) == [[0], [1], [2]]


def test_ranks_that_begin_at_equal_steps_do_not_differ() -> None:
    assert groups(rank(0, LAST, reported=261), rank(1, reported=261)) == []  # it was broadcast
    assert (
        groups(rank(0, LAST, reported=261), rank(1, {"last.pt": (1001, "b")}, reported=261)) == []
    )  # each saved its device
    assert groups(rank(0, reported=0), rank(1, reported=5)) == []  # nothing was read


def test_steps_of_different_sources_are_not_compared() -> None:
    """Only rank 0 reports steps, and it counts batches, of which an optimizer's step needs four."""
    assert groups(rank(0, LAST, reported=1044, counted=261), rank(1, counted=261)) == []
    assert groups(rank(0, LAST, reported=1044), rank(1, counted=261)) == []
    fresh = rank(1, counted=0, is_fresh=True)
    assert groups(rank(0, LAST, reported=1044, counted=261, is_fresh=False), fresh) == [[0], [1]]


def test_a_rank_without_a_file_differs_only_if_that_shows() -> None:
    assert groups(rank(0, LAST), rank(2)) == []
    assert groups(rank(0, LAST, is_fresh=False), rank(2, is_fresh=False)) == []
    assert groups(rank(0, LAST, is_fresh=True), rank(2, is_fresh=True)) == []
    assert groups(rank(0, LAST, is_fresh=False), rank(2, is_fresh=True)) == [[0], [2]]  # its optimizer has no state
    assert groups(rank(0, LAST, counted=261, is_fresh=False), rank(2)) == []  # its part has no parameters
    # It has caught FileNotFoundError, and then got everything from rank 0.
    assert groups(rank(0, LAST, is_fresh=False), rank(2, {}, is_fresh=False)) == []


@pytest.mark.parametrize(
    ("files", "others", "differ"),
    [
        ({"last.pt": "a"}, {"last.pt": "a"}, False),
        ({"last.pt": "a"}, {"last.pt": "b"}, True),
        ({"last.pt": "a"}, {}, False),
        ({"step-261.pt": "a"}, {"step-200.pt": "b"}, True),
        ({"261/.metadata": "m", "261/__0_0.distcp": "0"}, {"200/.metadata": "n", "200/__2_0.distcp": "2"}, True),
        ({"last.pt": "a", "rng_0.pt": "0"}, {"last.pt": "b", "rng_2.pt": "2"}, True),
    ],
)
def test_files_decide_only_if_the_optimizers_have_counted_different_steps(
    files: dict[str, str], others: dict[str, str], differ: bool
) -> None:
    """An expert, which only one rank has, takes fewer steps. Without counts, the files may be parts of one model."""
    first, other = ({name: (1000 - len(name), text) for name, text in read.items()} for read in (files, others))
    assert groups(rank(0, first, counted=261), rank(2, other, counted=200)) == ([[0], [2]] if differ else [])
    assert groups(rank(0, first, counted=261), rank(2, other, counted=261)) == []
    assert groups(rank(0, first, counted=261), rank(2, other)) == []
    assert groups(rank(0, first, is_fresh=False), rank(2, other, is_fresh=False)) == []
    assert groups(rank(0, first, is_fresh=True), rank(2, other, is_fresh=True)) == []  # each node has a config.json
    assert groups(rank(0, first, is_fresh=False), rank(2, other, is_fresh=True)) == [[0], [2]]


def test_a_number_of_a_file_may_be_that_of_its_rank() -> None:
    stages = [rank(number, {f"stage-{number // 2}.pt": (9, "")}, counted=20 - number // 2) for number in range(4)]
    assert groups(*stages) == []
    epochs = rank(0, {"epoch-0.pt": (9, "")}, counted=20), rank(2, {"epoch-1.pt": (9, "")}, counted=10)
    assert groups(*epochs) == []  # not noticed


def test_ranks_that_were_not_observed_are_not_compared() -> None:
    assert groups(rank(0, LAST, reported=5), rank(1, is_known=False)) == []
    resumes = [rank(0, LAST, reported=5), rank(1, is_known=False), rank(2, reported=0)]
    assert groups(*resumes) == [[0], [2]]
    text = describe_differences(find_differences(resumes), [1])
    assert all(fact in text for fact in ("rank 0 from last.pt at step 5", "rank 2 from no file at step 0", "rank 1)"))
