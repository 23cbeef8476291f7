"""Which ranks resume from different checkpoints, and which only seem to."""

from typing import Any

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
    assert groups(rank(0, LAST, reported=1044, counted=261), rank(1, counted=0)) == [[0], [1]]


def test_a_rank_without_a_file_differs_only_if_that_shows() -> None:
    assert groups(rank(0, LAST), rank(2)) == []
    assert groups(rank(0, LAST, is_fresh=False), rank(2, is_fresh=False)) == []
    assert groups(rank(0, LAST, is_fresh=True), rank(2, is_fresh=True)) == []
    assert groups(rank(0, LAST, is_fresh=False), rank(2, is_fresh=True)) == [[0], [2]]  # its optimizer has no state
    assert groups(rank(0, LAST), rank(2, {"last.pt": (-1, "")})) == [[0], [2]]  # it tried to open the file
    assert groups(rank(0, {"last.pt": (-1, "")}), rank(2, {"last.pt": (-1, "")})) == []


def test_files_decide_if_the_steps_are_unknown() -> None:
    assert groups(rank(0, LAST), rank(2, LAST)) == []
    assert groups(rank(0, LAST), rank(2, {"last.pt": (1000, "b")})) == [[0], [2]]
    assert groups(rank(0, {"step-261.pt": (1000, "a")}), rank(2, {"step-200.pt": (1000, "b")})) == [[0], [2]]
    both = {"config.json": (9, "c")}
    assert groups(rank(0, both | {"261.pt": (1000, "a")}), rank(2, both | {"200.pt": (1000, "b")})) == [[0], [2]]
    pointer = rank(0, {"latest": (3, "x"), "261/0.pt": (9, "a")}), rank(1, {"latest": (3, "y"), "200/1.pt": (9, "b")})
    assert groups(*pointer) == [[0], [1]]


def test_shards_of_one_checkpoint_are_one_checkpoint() -> None:
    shards = [{"261/.metadata": (10, "m"), f"261/__{number}_0.distcp": (100, str(number))} for number in range(4)]
    assert groups(*(rank(number, files) for number, files in enumerate(shards))) == []
    fewer = rank(0, shards[0] | shards[2]), rank(1, shards[1] | shards[3])
    assert groups(*fewer) == []
    older = {name.replace("261", "200"): file for name, file in shards[2].items()}
    assert groups(rank(0, shards[0]), rank(1, shards[1]), rank(2, older)) == [[0, 1], [2]]
    named = [rank(number, {f"step-261-rank-{number:02}.pt": (9, str(number))}) for number in range(4)]
    assert groups(*named) == []
    of_nodes = [rank(number, {f"node{number // 2}-261.pt": (9, str(number // 2))}) for number in range(4)]
    assert groups(*of_nodes) == []


def test_a_file_of_random_state_for_each_rank_is_no_difference() -> None:
    states = [{f"rng_{number}.pt": (20, str(number))} for number in range(4)]
    assert groups(*(rank(number, LAST | state) for number, state in enumerate(states))) == []
    assert groups(*(rank(number, state if number else LAST | state) for number, state in enumerate(states))) == []
    stale = {"last.pt": (1000, "b")}
    assert groups(*(rank(number, (stale if number > 1 else LAST) | states[number]) for number in range(4))) == [
        [0, 1], [2, 3]
    ]  # fmt: skip
    of_nodes = [LAST | {"rng.pt": (20, str(number))} for number in range(2)]  # in folders that are not shared
    assert groups(*(rank(number, of_nodes[number // 2]) for number in range(4))) == []


def test_ranks_that_were_not_observed_are_not_compared() -> None:
    assert groups(rank(0, LAST, reported=5), rank(1, is_known=False)) == []
    resumes = [rank(0, LAST, reported=5), rank(1, is_known=False), rank(2, reported=0)]
    assert groups(*resumes) == [[0], [2]]
    text = describe_differences(find_differences(resumes), [1])
    assert all(fact in text for fact in ("rank 0 from last.pt at step 5", "rank 2 from no file at step 0", "rank 1)"))
