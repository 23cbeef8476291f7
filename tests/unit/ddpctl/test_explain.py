"""The cause and the culprit that explain finds, from evidence as ddprun.health.diagnosis writes it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names
from tests.unit.ddpctl.test_run_store import make

from ddpctl.commands.explain import last_events
from ddpctl.diagnosis.explain import (
    Cause,
    Explanation,
    explain_events,
    explain_outcome,
    explain_ranks,
)
from ddpctl.diagnosis.rank_view import RankView, read_answer
from ddpctl.execution.node_probe import ProbeResult
from ddpwire.events import EVENTS, Event
from ddpwire.run_files import Outcome, diagnosis_file

GUIDE = Path(__file__).parents[3] / "docs/explain.md"
NOW = 1_800_000_000.0
TORCH = "/venv/lib/python3.11/site-packages/torch/"
IN_ALL_REDUCE = [[f"{TORCH}distributed/distributed_c10d.py", 4181, "all_reduce"], ["/home/me/train.py", 12, "<module>"]]
IN_LOADER = [[f"{TORCH}utils/data/dataloader.py", 1400, "_get_data"], ["/home/me/train.py", 11, "<module>"]]
IN_SCRIPT = [["/home/me/dataset.py", 88, "read"], ["/home/me/train.py", 10, "<module>"]]
IN_WORKER = [["/home/me/dataset.py", 40, "decode"], [f"{TORCH}utils/data/_utils/fetch.py", 54, "fetch"]]


def entered(
    seq: int, at: float, *, op: str = "all_reduce", group: str = "0", size: int = 13, done: bool = True
) -> dict[str, Any]:
    return {"group": group, "desc": "default_pg", "seq": seq, "op": op, "sizes": [[size]], "dtypes": ["Float"],
            "p2p": False, "done": done, "at": at}  # fmt: skip


def rank(number: int, collectives: list[dict[str, Any]], stack: list[list[Any]] = IN_ALL_REDUCE, **state: Any) -> Any:
    sample = {"state": "S", "wchan": "futex_do_wait", "ticks": 5, "threads": [stack]} | state
    samples = [sample | {"time": NOW - 1}, sample | {"time": NOW}]
    return {"rank": number, "pid": 7, "step": None, "group_at": NOW - 61, "samples": samples, "children": [],
            "collectives": collectives, "time": NOW}  # fmt: skip


def explained(*ranks: Any, per_node: int = 2, clocks: tuple[float | None, ...] = (0.0, 0.0)) -> Explanation:
    nodes = [{"node": node, "ranks": ranks[per_node * node : per_node * (node + 1)]} for node in range(2)]
    views = [
        view for node, clock in zip(nodes, clocks, strict=True) for view in read_answer(node, clock_offset_s=clock)
    ]
    return explain_ranks(views, len(ranks))


def views(*ranks: Any) -> list[RankView]:
    return [view for entry in ranks for view in read_answer({"node": entry["rank"] // 2, "ranks": [entry]})]


def check_names(explanation: Explanation, *facts: str) -> None:
    """Check that the sentence names ranks, collectives, places in the code, times."""
    missing = [fact for fact in facts if fact not in explanation.sentence]
    assert not missing, f"{missing} not in: {explanation.sentence}"


def facts(explanation: Explanation) -> tuple[str, int | None, bool]:
    return explanation.cause, explanation.rank, explanation.fault


BEFORE = [entered(seq, NOW - 60 + seq * 0.1) for seq in range(1, 8)]
WAITS = [*BEFORE, entered(8, NOW - 40, done=False)]


def test_a_rank_that_is_missing_is_named_with_what_it_does():
    explanation = explained(
        rank(0, WAITS), rank(1, WAITS), rank(2, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep"), rank(3, WAITS)
    )
    assert (facts(explanation), explanation.node, len(explanation.evidence)) == (("missing", 2, True), 1, 4)
    check_names(
        explanation, "rank 2 (node 1)", "all_reduce #8", "Float [13]", "3 ranks", "40 s", "dataset.py:88 (read)"
    )
    assert all(re.match(rf"rank {rank} \(node {rank // 2}\): ", line) for rank, line in enumerate(explanation.evidence))
    assert ["all_reduce at train.py:12" in line for line in explanation.evidence] == [True, True, False, True]
    assert "dataset.py:88 (read)" in explanation.evidence[2]


def test_a_short_wait_is_no_hang_and_a_rank_that_computes_no_fault():
    waits = [*BEFORE, entered(8, NOW - 8, done=False)]
    explanation = explained(rank(0, waits), rank(1, BEFORE, IN_SCRIPT))
    assert facts(explanation) == ("missing", 1, False)
    check_names(explanation, "rank 1 (node 0)", "8.0 s", "30 s")
    moment = [*BEFORE, entered(8, NOW - 0.5, done=False)]
    assert facts(explained(rank(0, moment), rank(1, BEFORE, IN_SCRIPT))) == ("none", None, False)
    assert facts(explained(rank(0, WAITS), rank(1, BEFORE, IN_SCRIPT, state="R"))) == ("missing", 1, False)


def test_no_rank_is_named_while_the_ranks_go_on():
    late = [entered(8, NOW - 30, done=False)]
    ahead = [*BEFORE, entered(8, NOW - 20), entered(9, NOW - 1, done=False)]  # read later than the others
    assert facts(explained(rank(0, BEFORE, IN_SCRIPT, state="R"), rank(1, late), rank(2, ahead))) == (
        "none",
        None,
        False,
    )
    traced = rank(1, BEFORE, IN_SCRIPT)
    traced["samples"][-1]["state"] = "t"  # by strace or py-spy, for a moment
    assert facts(explained(rank(0, BEFORE, state="R"), traced))[:2] == ("unknown", None)
    executed = {"threads": None}
    for other in ("S", "R"):
        explanation = explained(rank(0, [], state=other, **executed), rank(1, [], state="R", **executed))
        assert facts(explanation) == ("unknown", None, False)  # it computes, and may hang


@pytest.mark.parametrize(
    ("late_s", "size", "text"),
    [
        (0.0, 25_000_000, r"100\.0 MB"),
        (1.0, 13, r"0\.5 s .* 1\.5 s"),
    ],
)
def test_no_rank_is_named_where_all_are_slow(late_s, size, text):
    every = [entered(seq, NOW - 60 + 0.5 * seq + late_s * max(0, seq - 20), size=size) for seq in range(1, 41)]
    explanation = explained(rank(0, every, IN_SCRIPT, state="R"), rank(1, every, IN_SCRIPT, state="R"))
    assert facts(explanation) == ("none", None, False)
    check_names(explanation, "dataset.py:88 (read)", "4 of 4")
    assert re.search(text, explanation.sentence)


def test_ranks_of_which_one_computes_on_one_line_may_not_advance():
    loops = rank(0, BEFORE, IN_SCRIPT, state="R")
    explanation = explained(loops, rank(1, BEFORE), rank(2, BEFORE), rank(3, BEFORE))
    assert facts(explanation) == ("unknown", None, False)
    check_names(explanation, "rank 0 uses CPU time")
    unseen = rank(1, BEFORE, IN_SCRIPT)
    unseen["samples"][0]["threads"] = None  # a busy machine: one sample without an answer is no other code
    assert facts(explained(rank(0, BEFORE, IN_SCRIPT), unseen)) == ("unknown", None, False)


def test_a_rank_that_is_seen_in_the_collective_is_not_missing():
    silent = rank(1, []) | {"unknown": "no answer within 1 s"}
    explanation = explained(rank(0, WAITS), silent, rank(2, WAITS), rank(3, WAITS))
    assert facts(explanation)[:2] == ("unknown", None)
    assert explained(rank(0, WAITS), silent | {"samples": rank(1, [], IN_SCRIPT)["samples"]}).rank == 1


def test_without_its_clock_a_late_node_is_no_fault():
    late = [[entered(seq, NOW - 60 + 0.2 * seq + lag) for seq in range(1, 31)] for lag in (0.0, 0.1)]
    ranks = [rank(number, late[number // 2], IN_SCRIPT, state="R") for number in range(4)]
    explanation = explained(*ranks)
    assert (explanation.cause, explanation.node, explanation.fault, explanation.unknown) == ("straggler", 1, True, ())
    unsure = explained(*ranks, clocks=(0.0, None))
    assert (unsure.cause, unsure.node, unsure.fault) == ("straggler", 1, False)
    assert "clock of node 1" in unsure.unknown[0]


@pytest.mark.parametrize(
    ("other", "call"),
    [({"op": "broadcast"}, "broadcast #8 of the default group with Float [13]"),
     ({"size": 7}, "all_reduce #8 of the default group with Float [7]")],
)  # fmt: skip
def test_a_mismatch_names_the_rank_that_differs_and_both_calls(other, call):
    odd = [*BEFORE, entered(8, NOW - 40, done=False, **other)]
    (file, line, op), *callers = IN_ALL_REDUCE
    called = [[file, line, other.get("op", op)], *callers]
    explanation = explained(rank(0, WAITS), rank(1, odd, called), rank(2, WAITS), rank(3, WAITS))
    assert facts(explanation) == ("mismatch", 1, True)
    check_names(explanation, "rank 1 (node 0)", call, "3 ranks", "all_reduce #8 with Float [13]", "train.py:12")
    before = [*BEFORE, entered(8, NOW - 59.2, **other), entered(9, NOW - 40, done=False)]  # gloo may complete it
    waits = [*BEFORE, entered(8, NOW - 59.2), entered(9, NOW - 40, done=False)]
    assert facts(explained(rank(0, waits), rank(1, before), rank(2, waits))) == ("mismatch", 1, True)


def test_ranks_that_call_groups_in_different_orders_are_named():
    pair = [*BEFORE, entered(1, NOW - 40, group="1", done=False)]
    explanation = explained(rank(0, [*WAITS, entered(0, NOW - 59, group="1")]), rank(1, pair))
    assert (explanation.cause, explanation.fault) == ("order", True)
    check_names(explanation, "rank 0 (node 0)", "all_reduce #8", "rank 1", "all_reduce #1 of group 1", "40 s")


def test_each_cause_has_a_row_in_the_guide_to_which_the_sentence_leads():
    rows = re.findall(r"^\| (`.+?) \|", GUIDE.read_text(), re.M)
    assert {*get_args(Cause)} == {cause for row in rows for cause in re.findall("`([a-z_]+)`", row)}


@pytest.mark.parametrize(
    ("culprit", "cause", "facts_of_rank"),
    [
        (rank(1, BEFORE, IN_SCRIPT, state="T"), "stopped_process", ["SIGSTOP", "kill -CONT"]),
        (rank(1, BEFORE, IN_SCRIPT) | {"samples": [{"time": NOW, "threads": None}], "unknown": "gone"}, "ended_early",
         ["all_reduce #8", "40 s"]),
        (rank(1, [], IN_SCRIPT) | {"group_at": None, "unknown": "it has no process group"}, "no_group",
         ["init_process_group", "61 s", "dataset.py:88 (read)"]),
        (rank(1, BEFORE, [["/usr/lib/python3.11/threading.py", 1590, "_shutdown"]]), "missing",
         ["all_reduce #8", "40 s", "end of its script"]),
        (rank(1, BEFORE, [[f"{TORCH}serialization.py", 9, "save"], *IN_SCRIPT]), "checkpoint",
         ["all_reduce #8", "40 s", "saving at dataset.py:88 (read)"]),
        (rank(1, BEFORE, IN_LOADER) | {"children": [{"state": "S", "threads": [IN_WORKER]}]}, "data_loader",
         ["all_reduce #8", "40 s", "data loader at train.py:11", "dataset.py:40 (decode)"]),
    ],
)  # fmt: skip
def test_what_a_missing_rank_does_is_the_cause(culprit, cause, facts_of_rank):
    waits = [] if cause == "no_group" else WAITS
    explanation = explained(rank(0, waits), culprit)
    assert facts(explanation) == (cause, 1, True)
    check_names(explanation, "rank 1 (node 0)", *facts_of_rank)


def test_a_rank_that_does_not_answer_is_named_only_where_all_others_wait():
    silent = rank(1, [], IN_SCRIPT, state="R") | {"unknown": "its flight recorder did not answer within 1 s"}
    explanation = explained(rank(0, WAITS), silent, rank(2, WAITS))
    unknown = f"which collectives rank 1 (node 0) has entered: {silent['unknown']}"
    assert (facts(explanation), explanation.unknown) == (("missing", 1, True), (unknown,))
    check_names(explanation, "rank 1 (node 0)", "all_reduce #8", "ranks 0 and 2", "40 s", "dataset.py:88 (read)")
    assert explained(rank(0, WAITS), silent, silent | {"rank": 2}).rank is None


def steps(late_s: float, count: int = 30, clock_s: float = 0.0) -> list[dict[str, Any]]:
    return [entered(seq, NOW - 60 + seq * 0.2 + late_s + clock_s) for seq in range(1, count)]


def test_a_straggler_is_named_with_its_lag():
    explanation = explained(rank(0, steps(0)), rank(1, steps(0.001)), rank(2, steps(0.1), IN_SCRIPT), rank(3, steps(0)))
    assert facts(explanation) == ("straggler", 2, True)
    check_names(explanation, "rank 2 (node 1)", "29 of 29", "99 ms", "dataset.py:88 (read)")
    others = [rank(number, steps(0)) for number in (0, 1, 3)]
    assert facts(explained(*others, rank(2, [*steps(0)[:14], *steps(0.1)[14:]], IN_SCRIPT))) == ("straggler", 2, True)
    asleep = [rank(number, steps(0), wchan="hrtimer_nanosleep") for number in (0, 1, 3)]
    assert explained(*asleep[:2], rank(2, steps(0.1), IN_SCRIPT), asleep[2]).cause != "straggler", "none waits for it"


def linked(view: Any, *links: list[Any]) -> Any:
    return view | {"samples": [sample | {"links": [*links]} for sample in view["samples"]]}


def test_a_link_that_is_down_is_named_and_no_rank():
    """Some ranks are in the next collective, as their part of the last one arrived."""
    ahead = [*BEFORE, entered(8, NOW - 40, op="reduce"), entered(9, NOW - 39, done=False)]
    behind = [*BEFORE, entered(8, NOW - 40, op="reduce", done=False)]
    to_1, to_0 = ["0A", "0B", 90, 7], ["0B", "0A", 0, 0]
    explanation = explained(
        linked(rank(0, ahead), to_1), rank(1, ahead), linked(rank(2, behind), to_0), linked(rank(3, behind), to_0)
    )
    assert (facts(explanation), explanation.node) == (("network", None, True), None)
    check_names(explanation, "node 0 and node 1", "40 s")
    links = [["0A", "0B", 90, 0]] * 2 + [["0B", "0A", 90, 0]] * 2
    for op, is_advised in (("all_reduce", True), ("broadcast", False)):
        waits = [*BEFORE, entered(8, NOW - 20, op=op, done=False)]
        slow = explained(*(linked(rank(number, waits), link) for number, link in enumerate(links)))
        assert (slow.cause, "--communication" in slow.sentence) == ("network", is_advised)
    elsewhere = linked(rank(0, BEFORE, state="R"), ["0A", "7F", 90, 15])  # a service that no longer answers
    assert facts(explained(elsewhere, rank(1, BEFORE))) == ("unknown", None, False)


def test_the_first_rank_and_step_with_a_nan_are_named():
    def reported_nan(number: int, step: int, attempt: int = 1) -> Event:
        source = {"what": "loss"}
        return Event(event="not_finite", time=NOW, node=0, rank=number, step=step, attempt=attempt, facts=source)

    (explanation,) = explain_events(
        [reported_nan(0, 13), reported_nan(1, 12), reported_nan(2, 13), reported_nan(3, 2, attempt=0)]
    )
    assert facts(explanation) == ("nan", 1, True)
    check_names(explanation, "loss", "rank 1 (node 0)", "step 12")
    restarted = Event(event="ranks_started", time=NOW + 1, node=0, attempt=2)
    assert explain_events([reported_nan(0, 12), restarted]) == []
    started_again = Event(event="node_started", time=NOW + 1, node=0)
    answer = ProbeResult(node=0, files={EVENTS: f"{reported_nan(0, 12).line()}\n{started_again.line()}\n"})
    assert [event.event for event in last_events([answer])] == ["node_started"]
    (both,) = explain_events([reported_nan(0, 12), reported_nan(1, 12)])
    assert both.rank is None
    assert explain_events([]) == []
    data = Outcome(code=65, cause="error", message="rank 0 exited with 65", node=0, rank=0)
    assert facts(explain_outcome(data, (), "", [reported_nan(1, 12)], 2)) == ("nan", 1, True)
    later = explain_outcome(replace(data, code=1), (), "", [reported_nan(1, 12)], 2)  # perhaps for another reason
    assert (facts(later), "step 12" in later.sentence) == (("failed", 0, True), True)


def test_different_checkpoints_explain_a_run_only_in_the_attempt_that_loaded_them() -> None:
    apart = Event(event="resumed_apart", time=NOW, node=0, attempt=2, facts={"message": "rank 0 from last.pt"})
    (explanation,) = explain_events([apart])
    assert facts(explanation) == ("resumed_apart", None, True)
    failed = Outcome(code=1, cause="error", message="rank 1 exited with 1", node=1, rank=1, attempt=2)
    explained_end = explain_outcome(failed, (), "", [apart], 2)
    assert (facts(explained_end), "last.pt" in explained_end.sentence) == (("failed", 1, True), True)
    assert explain_events([apart, replace(apart, event="ranks_started", attempt=3)]) == []


def test_a_lost_node_is_named_with_the_end_of_its_log_and_no_rank(tmp_path: Path) -> None:
    run = Path(make(tmp_path / "runs", "night", NOW).folder)
    for node in (0, 1):
        (run / f"node-{node}").mkdir()
        (run / f"node-{node}/node.log").write_text(f"[node{node}] the last line\n")
    lost = Outcome(code=137, cause="node_lost", message="node 1 was lost: its ddprun stopped responding", node=1)
    lost.write(run / "node-0")
    explanation = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (explanation["cause"], explanation["rank"], explanation["node"]) == ("node_lost", None, 1)
    assert explanation["evidence"] == ["[node1] the last line"]
    shown = ddpctl("explain", "night").stdout
    assert all(fact in shown for fact in (lost.message, "[node1] the last line", "docs/explain.md, cause node_lost"))


def test_nodes_that_do_not_match_are_explained_by_the_versions_that_differ(tmp_path: Path) -> None:
    run = Path(make(tmp_path / "runs", "night", NOW).folder)
    for node, packages in enumerate(("numpy==2.2.6 torch==2.13.0", "torch==2.10.0")):
        (run / f"node-{node}").mkdir()
        facts = {"python": "3.11.2", "cores": str(node), "packages": packages}
        (run / f"node-{node}/environment.json").write_text(json.dumps(facts))
    message = "the nodes do not match: torch is 2.10.0 on node 1, but 2.13.0 on node 0"
    Outcome(code=78, cause="config", message=message, node=1).write(run / "node-1")
    evidence = json.loads(ddpctl("explain", "night", "--json").stdout)["evidence"]
    assert evidence == [
        "numpy is 2.2.6 on node 0, not installed on node 1",
        "torch is 2.13.0 on node 0, 2.10.0 on node 1",
    ]
    assert_names(ddpctl("explain", "night").stdout, *evidence)


def test_nodes_that_lost_each_other_are_explained_by_their_network(tmp_path: Path) -> None:
    run = Path(make(tmp_path / "runs", "night", NOW).folder)
    for node, lost in enumerate((1, 0)):
        (run / f"node-{node}").mkdir()
        Outcome(code=137, cause="node_lost", message=f"node {lost} was lost", node=lost).write(run / f"node-{node}")
    explanation = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (explanation["cause"], explanation["rank"], explanation["fault"]) == ("network", None, True)
    assert "node 0" in explanation["sentence"]
    assert "node 1" in explanation["sentence"]
    outcome = Outcome(code=69, cause="unavailable", message="node 0 does not answer", node=1)
    outcome.write(run / "node-1")
    assert json.loads(ddpctl("explain", "night", "--json").stdout)["sentence"] == outcome.message


def test_after_a_timeout_the_ranks_that_were_in_no_collective_are_named():
    message = "rank 1 on node 0 exited with 1: RuntimeError: Timed out waiting 12000ms for recv operation to complete"
    outcome = Outcome(code=1, cause="error", message=message, node=0, rank=1)
    assert outcome.has_diagnosis
    failed, absent = rank(1, BEFORE, state="Z"), rank(2, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep")
    explanation = explain_outcome(outcome, views(rank(0, WAITS), failed, absent), "", (), 4)
    assert (facts(explanation), explanation.node) == (("missing", 2, True), 1)
    check_names(explanation, "Timed out waiting", "rank 2 (node 1)", "dataset.py:88 (read)")
    explanation = explain_outcome(outcome, views(rank(0, WAITS), failed), "", (), 2)
    assert facts(explanation) == ("failed", 1, True)
    assert not replace(outcome, message="rank 1 on node 0 exited with 1: ValueError: X").has_diagnosis
    aborted = replace(outcome, code=134, cause="killed", message="rank 1 on node 0 was killed by SIGABRT")
    assert aborted.has_diagnosis
    others, log = views(failed, absent), "[E1128] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)\n"
    assert facts(explain_outcome(aborted, others, log, (), 4)) == ("missing", 2, True)
    assert facts(explain_outcome(aborted, others, "an assertion failed\n", (), 4))[:2] == ("failed", 1), "no time-out"


def test_an_end_is_explained_by_its_outcome_its_log_and_who_ended_before():
    failed = Outcome(code=1, cause="error", message="rank 0 on node 0 exited with 1: X", node=0, rank=0, step=4)
    explanation = explain_outcome(failed, (), "one\nOSError: [Errno 28] No space left on device\n", (), 2)
    assert (facts(explanation), explanation.evidence[-1][:7]) == (("disk_full", 0, True), "OSError")
    stopped = replace(failed, code=143, cause="stopped", message="stopped by SIGTERM")
    assert explain_outcome(stopped, (), "a warning\n", (), 2).evidence == ()
    header = "Traceback (most recent call last):\n"
    caught = f"CUDA out of memory\n{header}RuntimeError: CUDA out of memory\ntrying less\n"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert facts(explain_outcome(failed, (), f"{caught}{header}ValueError: X\n", (), 2))[0] == "failed"
    log = f"{caught}{header}OSError: No space left on device\n{chain}{header}ValueError: X\n"
    assert facts(explain_outcome(failed, (), log, (), 2))[0] == "disk_full"
    assert facts(explain_outcome(failed, (), re.sub("(?m)^", "[rank0]: ", log), (), 2))[0] == "disk_full"
    killed = replace(failed, code=134, cause="killed", message="rank 0 on node 0 was killed by SIGABRT")
    log = "  what(): op.preamble.length <= op.nbytes. 8 vs 4.\nFatal Python error: Aborted\n\nThread 0x7f:\n  File\n"
    assert facts(explain_outcome(killed, (), log, (), 2)) == ("mismatch", None, True)
    lost = Outcome(code=1, cause="error", message="rank 0: RuntimeError: Connection closed by peer", node=0, rank=0)
    exits = [
        Event(event="rank_exited", time=NOW, node=1, rank=3, facts={"status": 0}),
        Event(event="rank_exited", time=NOW + 1, node=0, rank=0, facts={"status": 1}),
    ]
    explanation = explain_outcome(lost, (), "", exits, 4)
    assert (facts(explanation), explanation.node) == (("ended_early", 3, True), 1)
    check_names(explanation, "Connection closed by peer", "rank 3 (node 1)")
    assert facts(explain_outcome(lost, (), "", exits[1:], 4)) == ("failed", 0, True)
    done = Outcome(code=0, cause="ok", message="every rank exited with 0")
    assert facts(explain_outcome(done, (), "", (), 4)) == ("none", None, False)


def test_a_hang_that_was_killed_is_explained_by_the_saved_evidence(tmp_path: Path):
    hung = Outcome(code=144, cause="hang", message="rank 1 on node 0 hung", node=0, rank=1)
    kept = read_answer({"node": 0, "ranks": [rank(0, WAITS), rank(1, BEFORE, IN_SCRIPT)]})
    assert facts(explain_outcome(hung, kept, "", (), 2)) == ("missing", 1, True)
    assert explain_outcome(hung, (), "", (), 2).unknown
    node = Path(make(tmp_path / "runs", "night", NOW).folder) / "node-0"
    node.mkdir()
    hung.write(node)
    ranks = [rank(0, WAITS), rank(1, BEFORE, IN_SCRIPT)]
    (node / diagnosis_file(1)).write_text(json.dumps({"node": 0, "ranks": ranks}))
    assert json.loads(ddpctl("explain", "night", "--json").stdout)["cause"] == "missing"
    replace(hung, code=143, cause="stopped", message="stopped by SIGTERM").write(node)
    stopped = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (stopped["cause"], stopped["rank"], stopped["fault"]) == ("none", None, False)


@pytest.mark.parametrize(("printed", "evidence"), [("", "no traceback"), ("epoch 1\n", "epoch 1")])
def test_a_harmless_warning_of_torch_is_no_evidence(printed: str, evidence: str, tmp_path: Path) -> None:
    node = Path(make(tmp_path / "runs", "night", NOW).folder) / "node-0"
    node.mkdir()
    Outcome(code=7, cause="error", message="rank 1 exited with 7", node=0, rank=1).write(node)
    warning = (
        "[W1125 10:31:07.123456789 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. "
        "err=-3\n"
    )
    (node / "rank-1.log").write_text(f"{warning}{printed}[rank1]:{warning}")
    explanation = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (explanation["cause"], explanation["rank"], len(explanation["evidence"])) == ("failed", 1, 1)
    assert evidence in explanation["evidence"][0]
    assert "hostname" not in explanation["evidence"][0]
    (node / "rank-1.log").unlink()
    assert json.loads(ddpctl("explain", "night", "--json").stdout)["evidence"] == [], "nothing is known of its log"
