"""Variations of a sound script that a rehearsal must not accuse."""

from collections.abc import Callable

import pytest
from tests.unit.ddpctl import test_rehearsal
from tests.unit.ddpctl.test_rehearsal import (
    AT,
    BATCHES,
    STEPS,
    WORLD,
    Runs,
    different_weights,
    each,
    leaves,
    ranks,
    run,
    same_samples,
    second_starts,
    sound,
    starts_over,
    verdicts,
    with_batches,
)

from ddpctl.diagnosis.rehearsal import QUESTIONS


def test_samples_without_integers_have_no_order() -> None:
    runs = sound()
    with_batches(lambda rank, _, place: -1 - 5 * (place * WORLD + rank) % (BATCHES * WORLD))(runs)
    assert verdicts(runs)["order"] == "unknown"


def test_the_stages_of_a_pipeline_have_different_weights() -> None:
    runs = sound()
    different_weights(runs)
    runs["plain", ""]["processes"][1]["begin"][0]["weights"] += " of another stage"
    assert verdicts(runs)["group"] == "unknown"


def test_the_ranks_of_a_sharded_model_may_read_the_same_batches() -> None:
    runs = sound()
    same_samples(runs)
    each(runs, "begin", lambda begin: begin.update(sharded=True))
    assert verdicts(runs)["samples"] == "unknown"


def test_a_start_with_other_weights_is_not_known_to_begin_at_step_1() -> None:
    runs = sound()
    starts_over(runs)
    for rank in second_starts(runs):
        rank["begin"][0]["weights"] = "others"
    assert verdicts(runs)["resume"] == "unknown"


def test_a_second_run_with_fewer_steps_leaves_unknown_what_compares_runs() -> None:
    runs = sound() | {("again", ""): run(*ranks(AT))}
    starts_over(runs)
    runs["again", ""]["processes"] = ranks(0, AT)
    answers = verdicts(runs)
    assert {answers[name] for name in ("repeatable", "resume", "kill-rank", "save-term")} == {"unknown"}
    assert "fault" not in answers.values()


def test_a_node_that_was_killed_may_begin_again_with_its_first_attempt() -> None:
    runs = sound()
    each(runs, "start", lambda start: start.update(attempt=1), ("kill-node", ""))
    assert verdicts(runs) == dict.fromkeys(QUESTIONS, "ok")


def test_epochs_of_ranks_with_different_numbers_of_steps_are_not_compared() -> None:
    runs = sound()
    for key in (("plain", ""), ("again", "")):
        late = runs[key]["processes"][1]  # it has loaded what rank 0 has saved in the same run
        late["step"], late["epoch"] = late["step"][BATCHES:], late["epoch"][1:]
    assert verdicts(runs)["samples"] == "unknown"


def test_a_loss_that_is_not_a_number_is_named() -> None:
    runs = sound()
    runs["plain", ""]["processes"][0]["step"][2]["loss"] = float("nan")
    assert verdicts(runs)["repeatable"] == "unknown"


@pytest.mark.parametrize(
    "samples",
    [lambda rank, *_: rank, lambda rank, epoch, place: 40 * (place * WORLD + rank) + epoch],
    ids=["a sampler with replacement", "a part of the data set"],
)
def test_a_sampler_of_a_kind_that_is_not_known_is_not_accused(samples: Callable[[int, int, int], int]) -> None:
    runs = sound()
    with_batches(samples)(runs)
    assert verdicts(runs) == dict.fromkeys(QUESTIONS, "ok") | {"samples": "unknown"}


@pytest.mark.parametrize(("shift", "verdict"), [(0, "ok"), (1, "fault"), (100, "unknown")])
def test_without_numbers_of_samples_the_inputs_of_the_model_are_compared(shift: int, verdict: str) -> None:
    runs = sound()
    for rank in (rank for facts in runs.values() for rank in facts["processes"]):
        rank["loader"] = []
    each(runs, "step", lambda step: step.update(input=f"x{int(step['input'][1:]) - shift}"), ("resume", "term"))
    assert verdicts(runs)["resume-data"] == verdict


def test_a_run_that_was_cut_leaves_unknown_what_comes_later() -> None:
    runs = sound()
    for rank in runs["plain", ""]["processes"]:
        rank.update(cut=[{"cut": STEPS, "time": 9.0}], end=[], epoch=rank["epoch"][:1])
    assert {name for name, verdict in verdicts(runs).items() if verdict == "unknown"} == {"order"}
    leaves(runs, "term")
    assert verdicts(runs)["left"] == "fault"
    for name in ("term", "usr1", "int"):
        for rank in runs[name, ""]["processes"]:
            rank["end"] = []
    assert verdicts(runs)["left"] == "unknown"


def epoch_again(runs: Runs) -> None:
    runs["resume", "term"] = run(*ranks(AT, STEPS + BATCHES))


def other_shuffle(runs: Runs) -> None:
    each(runs, "step", lambda step: step["batches"][0][1].__setitem__(0, 11 - step["batches"][0][1][0]), ("disk", ""))


def other_rate(runs: Runs) -> None:
    each(runs, "step", lambda step: step.update(lr=[0.2]), ("resume", "term"))


FAULTS = {
    "an epoch is done again": (epoch_again, {"resume-data"}),
    "another shuffle": (other_shuffle, {"resume-data"}),
    "another learning rate": (other_rate, {"resume-optimizer"}),
}


@pytest.mark.parametrize(("change", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_and_no_other(change: Callable[[Runs], None], expected: set[str]) -> None:
    test_rehearsal.test_a_fault_is_named_and_no_other(change, expected)
