"""What ddpctl rehearse concludes from the facts of the runs: those of a sound script, of which some are changed."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names

from ddpctl.commands import rehearse as rehearse_command
from ddpctl.commands.launch import name_rehearse
from ddpctl.diagnosis.rehearsal import QUESTIONS, Row, judge
from ddpctl.execution.executor import Executor
from ddpctl.job.spec import JobSpec
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_store import Run

STEPS, BATCHES, EVERY, AT = 12, 6, 4, 6  # of a run, of an epoch; between saves; of the disturbance
WORLD = 2
Runs = dict[tuple[str, str], dict[str, Any]]


def state(step: int) -> dict[str, Any]:
    return {
        "weights": f"w{step}",
        "probe": [1.0 + step],
        "state": f"s{step}" * (step > 0),
        "lr": [0.1],
        "sharded": False,
    }


def batch(rank: int, step: int) -> tuple[int, list[int]]:
    """The samples of an epoch in another order in each epoch, each on one rank."""
    epoch, number = divmod(step - 1, BATCHES)
    return (epoch, [(number * WORLD + rank + 5 * epoch) % (BATCHES * WORLD)])


def process(rank: int, first: int = 0, last: int = STEPS, *, attempt: int = 1) -> dict[str, Any]:
    """A rank that begins after step ``first``, and saves every few steps."""
    own = range(first + 1, last + 1)
    saves = [step - first for step in own if rank == 0 and step % EVERY == 0]
    return {
        "rank": rank,
        "start": [{"start": rank, "time": float(attempt), "attempt": attempt}],
        "group": [{"group": rank, "time": 1.0, "world": WORLD}],
        "loader": [{"loader": "DataLoader", "time": 1.0}],
        "begin": [{"begin": 0, "time": 2.0, "batches": 1 + first % BATCHES, **state(first)}],
        "step": [
            {
                "step": number - first,
                "time": float(number),
                "loss": 1 / number,
                "input": f"x{number}",
                "reported": 0,
                "batches": [batch(rank, number)],
                **state(number),
            }
            for number in own
        ],
        "epoch": [
            {"epoch": number // BATCHES - 1, "time": float(number), "batches": []}
            for number in own
            if number % BATCHES == 0
        ],
        "save": [
            {"save": "last.pt", "time": float(first + at), "step": at, "error": "", "full": False} for at in saves
        ],
        "load": [{"load": "last.pt", "time": 1.0}] if first and rank == 0 else [],
        "file": [],
        "at": [],
        "error": [],
        "cut": [],
        "end": [{"end": 0, "time": 99.0, "left": []}],
    }


def run(*processes: dict[str, Any], code: int = 0, at: int | None = None, signalled: float = 0.0) -> dict[str, Any]:
    return {
        "act": {} if at is None else {"step": at, "rank": None, "do": "wait"},
        "nodes": 2,
        "ranks": 1,
        "began": 0.0,
        "seconds": 20.0,
        "signalled": signalled,
        "hung": False,
        "outcome": "it failed" if code else "",
        "codes": [code, code],
        "processes": [*processes],
        "left": [],
    }


def ranks(first: int = 0, last: int = STEPS, *, attempt: int = 1) -> list[dict[str, Any]]:
    return [process(rank, first, last, attempt=attempt) for rank in range(WORLD)]


def stopped(code: int) -> dict[str, Any]:
    """A run that saves step 6 after a signal."""
    facts = run(*ranks(0, AT), code=code, at=AT, signalled=AT - 0.5)
    facts["processes"][0]["save"].append({"save": "last.pt", "time": AT + 0.1, "step": AT, "error": "", "full": False})
    return facts


def full_disk() -> dict[str, Any]:
    facts = run(*ranks(0, 8), code=1, at=AT)
    facts["processes"][0]["save"][-1] |= {"full": True, "error": "RuntimeError: no space"}
    return facts


def sound() -> Runs:
    failed = run(*ranks(0, AT), code=1, at=AT, signalled=6.0)
    failed["processes"][1]["at"].append({"at": AT, "time": 18.0})
    return {
        ("plain", ""): run(*ranks()),
        ("again", ""): run(*ranks()),
        ("term", ""): stopped(143),
        ("resume", "term"): run(*ranks(AT)),
        ("ranks", "term"): run(process(0, AT)) | {"nodes": 1, "codes": [0]},
        ("usr1", ""): stopped(138),
        ("int", ""): stopped(130),
        ("kill-rank", ""): run(*ranks(0, AT), *ranks(EVERY, attempt=2), at=AT),
        ("kill-node", ""): run(*ranks(0, AT), *ranks(EVERY, attempt=2), at=AT),
        ("slow", ""): run(*ranks(), at=AT),
        ("disk", ""): full_disk(),
        ("resume", "disk"): run(*ranks(EVERY)),
        ("raise", ""): failed,
    }


def rows_of(runs: Runs) -> dict[str, Row]:
    return {row.id: row for row in judge([{"scenario": a, "after": b, **facts} for (a, b), facts in runs.items()])}


def verdicts(runs: Runs) -> dict[str, str]:
    return {name: row.verdict for name, row in rows_of(runs).items()}


def test_a_sound_script_has_no_fault() -> None:
    assert verdicts(sound()) == dict.fromkeys(QUESTIONS, "ok")
    assert f"kill-rank: after step {EVERY} of {AT}" in rows_of(sound())["resume"].evidence, "the step of its weights"


def each(runs: Runs, kind: str, change: Callable[[dict[str, Any]], None], *only: tuple[str, str]) -> None:
    for key in only or runs:
        for rank in runs[key]["processes"]:
            for fact in rank[kind]:
                change(fact)


def second_starts(runs: Runs) -> list[dict[str, Any]]:
    again = [rank for key in runs if key[1] for rank in runs[key]["processes"]]
    kills = [rank for key in runs if key[0].startswith("kill") for rank in runs[key]["processes"]]
    return [*again, *(rank for rank in kills if rank["start"][0]["attempt"] == 2)]


def no_group(runs: Runs) -> None:
    for facts in runs.values():
        for rank in facts["processes"]:
            rank["group"] = []


def different_weights(runs: Runs) -> None:
    for step in runs["plain", ""]["processes"][1]["step"]:
        step["weights"] += " of another model"


def with_batches(samples: Callable[[int, int, int], int]) -> Callable[[Runs], None]:
    """Return a change of all runs: ``samples`` maps a rank, an epoch and a batch of it to a sample."""

    def change(runs: Runs) -> None:
        for rank in (rank for facts in runs.values() for rank in facts["processes"]):
            for step in rank["step"]:
                epoch, place = divmod(int(step["weights"][1:]) - 1, BATCHES)
                step["batches"] = [(epoch, [samples(rank["rank"], epoch, place)])]

    return change


same_samples = with_batches(lambda _, epoch, place: (place + epoch) % BATCHES)
same_order = with_batches(lambda rank, _, place: 5 * (place * WORLD + rank) % (BATCHES * WORLD))


def does_not_save(*scenarios: str) -> Callable[[Runs], None]:
    def change(runs: Runs) -> None:
        for name in scenarios:
            saves = runs[name, ""]["processes"][0]["save"]
            saves[:] = [save for save in saves if save["time"] < AT]
        if "term" in scenarios:
            runs["resume", "term"] = run(*ranks(EVERY))
            runs["ranks", "term"]["processes"] = [process(0, EVERY)]

    return change


def starts_over(runs: Runs) -> None:
    for rank in second_starts(runs):
        rank.update(process(rank["rank"], attempt=rank["start"][0]["attempt"]))


def wrong_sample(runs: Runs) -> None:
    """The rest of an epoch is that from its beginning on."""
    for rank, facts in enumerate(runs["resume", "disk"]["processes"]):
        for number, step in enumerate(facts["step"], 1):
            step["batches"] = [batch(rank, number)]


def empty_optimizer(runs: Runs) -> None:
    for rank in second_starts(runs):
        rank["begin"][0]["state"] = ""


def one_rank_starts_over(runs: Runs) -> None:
    runs["resume", "term"]["processes"][1]["begin"][0] |= {"state": ""}


def ended(key: tuple[str, str], *, hung: bool = False) -> Callable[[Runs], None]:
    return lambda runs: runs[key].update(hung=hung, codes=[1, 1], outcome="rank 0 failed")


def loses_all(runs: Runs) -> None:
    for rank in runs["kill-rank", ""]["processes"][WORLD:]:
        rank.update(process(rank["rank"], attempt=2))


def torn_checkpoint(runs: Runs) -> None:
    runs["resume", "disk"] = run(code=1)


def leaves(runs: Runs, scenario: str = "plain") -> None:
    runs[scenario, ""]["processes"][1]["end"][0]["left"] = ["sleep 600"]


FAULTS: dict[str, tuple[Callable[[Runs], None], set[str]]] = {
    "no process group": (no_group, {"group"}),
    "models that are not synchronized": (different_weights, {"group"}),
    "the same samples on all ranks": (same_samples, {"samples"}),
    "the same order in each epoch": (same_order, {"order"}),
    "no save on any signal": (does_not_save("term", "usr1", "int"), {"save-term", "save-usr1", "save-int"}),
    "no save on Ctrl-C": (does_not_save("int"), {"save-int"}),
    "no save on SIGUSR1 alone": (does_not_save("usr1"), set()),  # ddpctl sends it only if it is asked to
    "no checkpoint is loaded": (starts_over, {"save-term", "resume", "kill-rank", "kill-node"}),
    "the wrong batch": (wrong_sample, {"resume-data"}),
    "the optimizer's state is lost": (empty_optimizer, {"resume-optimizer"}),
    "different checkpoints": (one_rank_starts_over, {"resume-optimizer", "same-checkpoint"}),
    "a resume that hangs": (ended(("resume", "term"), hung=True), {"same-checkpoint"}),
    "all steps are lost": (loses_all, {"kill-rank"}),
    "a slow rank ends the run": (ended(("slow", "")), {"slow"}),
    "the checkpoint is torn": (torn_checkpoint, {"disk"}),
    "fewer ranks fail": (ended(("ranks", "term")), {"ranks"}),
    "ranks go on after an exception": (ended(("raise", ""), hung=True), {"raise"}),
    "a process is left": (leaves, {"left"}),
}


@pytest.mark.parametrize(("change", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_and_no_other(change: Callable[[Runs], None], expected: set[str]) -> None:
    runs = sound()
    change(runs)
    rows = rows_of(runs)
    assert {key for key, row in rows.items() if row.verdict == "fault"} == expected
    assert all(bool(row.mend) == (row.verdict == "fault") for row in rows.values())


@pytest.mark.parametrize(("step", "time"), [(BATCHES, BATCHES + 0.5), (2, 2.5)], ids=["after an epoch", "in a step"])
def test_an_evaluation_between_a_batch_and_its_step_is_no_training(step: int, time: float) -> None:
    """Its samples may be the same on all ranks."""
    runs, evaluation = sound(), 100
    for rank in runs["plain", ""]["processes"]:
        batches = rank["step"][step]["batches"]
        batches.insert(0 if step == BATCHES else len(batches), (evaluation, [0, 1, 2]))
        rank["epoch"].insert(step // BATCHES, {"epoch": evaluation, "time": time, "batches": []})
    assert verdicts(runs) == dict.fromkeys(QUESTIONS, "ok")


def test_a_step_that_does_not_change_the_weights_is_told_apart_by_the_state() -> None:
    runs = sound()
    each(runs, "step", lambda step: step.update(weights="w0") if step["weights"] == "w1" else None)
    starts_over(runs)
    assert verdicts(runs)["resume"] == "fault"
    for kind in ("begin", "step"):
        each(runs, kind, lambda fact: fact.update(weights="w", state=""))
    answers = verdicts(runs)
    assert (answers["resume"], answers["kill-rank"]) == ("unknown", "unknown")


UNKNOWN = {"group": "unknown", "steps": "unknown", "left": "ok"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ({("plain", ""): run(*(rank | {"begin": [], "step": []} for rank in ranks()), code=3)}, UNKNOWN),
        ({("plain", ""): run(*ranks(0, 0), code=3)}, UNKNOWN),
        (sound() | {("plain", ""): run(*ranks(), code=3)}, {"group": "fault"}),
    ],
    ids=["no step", "the first step fails", "the undisturbed run fails"],
)
def test_a_run_that_fails_without_a_step_is_unknown_and_after_one_a_fault(runs: Runs, expected: dict[str, str]) -> None:
    assert verdicts(runs) == expected


def test_a_second_launch_that_takes_no_step_is_a_fault() -> None:
    assert verdicts(sound() | {("resume", "term"): run(code=3)})["resume"] == "fault"


def test_a_script_that_needs_gpus_is_judged_with_cpus_in_their_place() -> None:
    needs = {("gpus", ""): run(*ranks(0, 0), code=3)}
    rows = rows_of(needs | sound())
    assert {row.verdict for row in rows.values()} == {"ok"}
    assert_names(rows["steps"].evidence, "GPUs")
    assert_names(rows_of(needs | {("plain", ""): run(*ranks(0, 0), code=4)})["group"].evidence, "3", "4", "GPUs")


@pytest.mark.parametrize(
    ("path", "verdict"), [("/p/log", "unknown"), ("/w/node-0/checkpoints/x", "ok"), ("/tmp/w/node-0/tmp/x", "fault")]
)
def test_a_file_after_a_signal_is_a_checkpoint_only_in_the_folder_for_them(path: str, verdict: str) -> None:
    runs = sound()
    does_not_save("int")(runs)
    runs["int", ""]["processes"][0]["file"] = [{"file": path, "time": AT + 0.1}]
    assert verdicts(runs)["save-int"] == verdict


def test_what_could_not_be_recorded_is_unknown() -> None:
    runs = sound()
    runs["plain", ""]["processes"][0]["error"].append({"error": "_on_batch: TypeError()", "time": 1.0})
    assert verdicts(runs)["steps"] == "unknown"


def test_rows_of_scenarios_that_were_not_run_are_left_out_and_unknown_in_an_interrupted_rehearsal() -> None:
    runs = {key: facts for key, facts in sound().items() if key[0] in ("plain", "again", "int")}
    assert {*verdicts(runs)} == {"group", "steps", "repeatable", "samples", "order", "save-int", "left"}
    assert {row.verdict for row in judge([], ["int"])} == {"unknown"}
    facts = [{"scenario": a, "after": b, **run} for (a, b), run in runs.items()]
    answers = {row.id: row.verdict for row in judge(facts, ["int", "raise"])}
    assert (answers["save-int"], answers["raise"], answers.get("slow")) == ("ok", "unknown", None)


def test_a_script_that_is_not_seeded_is_compared_by_samples_and_states() -> None:
    runs = sound()
    each(runs, "step", lambda step: step.update(loss=9.0, probe=[-9.0]), ("again", ""))
    answers = verdicts(runs)
    assert (answers["repeatable"], answers["resume-weights"], answers["resume-data"]) == ("unknown", "unknown", "ok")


def a_run(*command: str) -> Run:
    job = JobSpec(name="night", nodes="1", gpus=1, command=command)
    places = {"cwd": "/p", "folder": "/runs/night", "checkpoint_dir": "/runs/night/checkpoints"}
    return Run(name="night", created=0.0, target="here", kind="local", options={}, job=job, version="0.1.0", **places)


def test_the_first_script_that_succeeds_is_told_once_that_it_can_be_rehearsed(tmp_path: Path) -> None:
    lines: list[str] = []
    context = AppContext(executor=Executor({}), root=tmp_path, emit=lines.append)
    name_rehearse(context, a_run("-m", "ddptrain"))
    assert lines == []
    for _ in range(2):
        name_rehearse(context, a_run("train.py", "--lr", "0.1"))
    (line,) = lines
    assert_names(line, "ddpctl rehearse -- train.py --lr 0.1")


@pytest.mark.parametrize(
    ("flags", "idle_s"), [((), 120), (("--hang-timeout", "7"), 7), (("--hang-timeout", "0"), math.inf)]
)
def test_a_rehearsal_has_no_spares_and_no_copies_and_knows_what_it_did_not_run_to_the_end(
    flags: tuple[str, ...], idle_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ddpctl.yaml").write_text("job: {command: [train.py], nodes: 2, spares: 1, checkpoint_copies: 2}\n")
    plans = []
    plain = [{"scenario": "plain", "after": "", **run(*ranks())}]

    def rehearse(_: object, request: Any, plan: Any) -> tuple[list[dict[str, Any]], int]:
        plans.append((request.job.spares, request.job.checkpoint_copies, plan["idle_s"], plan["scenarios"]))
        return plain, 130

    monkeypatch.setattr(rehearse_command, "_rehearse_here", rehearse)
    done = ddpctl("rehearse", "--only", "term", "--json", *flags, cwd=tmp_path)
    assert plans == [(0, 1, idle_s, ["term"])]
    answers = {row["id"]: row["verdict"] for row in json.loads(done.stdout)["rows"]}
    assert (done.returncode, answers["group"], answers["save-term"]) == (130, "ok", "unknown")
    assert "save-int" not in answers
    for refused in (("--nodes", "2:3"), ("--gpus", "2,1"), ("--only", "term,x")):
        assert ddpctl("rehearse", *refused, cwd=tmp_path).returncode == 2
