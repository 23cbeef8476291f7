"""What explain says of ranks, from evidence as ddprun.diagnosis writes it. Real ranks: tests/e2e/test_hang.py."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.unit.ddpctl.test_run_store import make
from tests.in_process import ddpctl
from tests.wording import Wording

from ddpctl.explain import Cause, Explanation, explain_not_finite, explain_outcome, explain_ranks, of_last_start
from ddpctl.rank_view import read_answer
from ddpwire.events import Event
from ddpwire.run_files import Outcome

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


def facts(found: Explanation) -> tuple[str, int | None, bool]:
    return found.cause, found.rank, found.fault


BEFORE = [entered(seq, NOW - 60 + seq * 0.1) for seq in range(1, 8)]
WAITS = [*BEFORE, entered(8, NOW - 40, done=False)]


def test_a_rank_that_is_missing_is_named_with_what_it_does(wording):
    found = explained(
        rank(0, WAITS), rank(1, WAITS), rank(2, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep"), rank(3, WAITS)
    )
    assert (facts(found), found.node, len(found.evidence)) == (("missing", 2, True), 1, 4)
    wording("\n".join([found.sentence, *found.evidence]))


def test_a_short_wait_is_no_hang(wording):
    waits = [*BEFORE, entered(8, NOW - 8, done=False)]
    found = explained(rank(0, waits), rank(1, BEFORE, IN_SCRIPT))
    assert facts(found) == ("missing", 1, False)
    wording(found.sentence)
    moment = [*BEFORE, entered(8, NOW - 0.5, done=False)]
    assert facts(explained(rank(0, moment), rank(1, BEFORE, IN_SCRIPT))) == ("none", None, False)


def test_ranks_that_go_on_are_not_accused():
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
    found = explained(rank(0, [], **executed), rank(1, [], state="R", **executed))
    assert facts(found) == ("unknown", None, False)  # it computes, and may hang


@pytest.mark.parametrize(
    ("late_s", "size", "text"),
    [
        (0.0, 25_000_000, r"a collective has 100\.0 MB on average"),
        (1.0, 13, r"they became slower: first 0\.5 s per collective, now 1\.5 s"),
    ],
)
def test_ranks_that_are_all_slow_are_described_and_not_accused(late_s, size, text):
    every = [entered(seq, NOW - 60 + 0.5 * seq + late_s * max(0, seq - 20), size=size) for seq in range(1, 41)]
    found = explained(rank(0, every, IN_SCRIPT, state="R"), rank(1, every, IN_SCRIPT, state="R"))
    assert facts(found) == ("none", None, False)
    assert "their code is at dataset.py:88 (read) in 4 of 4 samples" in found.sentence
    assert re.search(text, found.sentence)


def test_ranks_of_which_one_computes_on_one_line_are_not_said_to_advance(wording):
    loops = rank(0, BEFORE, IN_SCRIPT, state="R")
    found = explained(loops, rank(1, BEFORE), rank(2, BEFORE), rank(3, BEFORE))
    assert facts(found) == ("unknown", None, False)
    wording(found.sentence)
    unseen = rank(1, BEFORE, IN_SCRIPT)
    unseen["samples"][0]["threads"] = None  # a busy machine: one sample without an answer is no other code
    assert facts(explained(rank(0, BEFORE, IN_SCRIPT), unseen)) == ("unknown", None, False)


def test_collectives_may_have_other_sizes_on_each_rank():
    every = [[*BEFORE, entered(8, NOW - 40, op="all_to_all", size=size, done=False)] for size in (6, 9)]
    found = explained(rank(0, every[0]), rank(1, every[1]), rank(2, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep"))
    assert facts(found) == ("missing", 2, True)


def test_a_rank_that_is_seen_in_the_collective_is_not_said_to_be_missing():
    silent = rank(1, []) | {"unknown": "no answer within 1 s"}
    found = explained(rank(0, WAITS), silent, rank(2, WAITS), rank(3, WAITS))
    assert facts(found)[:2] == ("unknown", None)
    assert explained(rank(0, WAITS), silent | {"samples": rank(1, [], IN_SCRIPT)["samples"]}).rank == 1


def test_without_its_clock_a_late_node_is_no_fault(wording):
    late = [[entered(seq, NOW - 60 + 0.2 * seq + lag) for seq in range(1, 31)] for lag in (0.0, 0.1)]
    ranks = [rank(number, late[number // 2], IN_SCRIPT, state="R") for number in range(4)]
    found = explained(*ranks)
    assert (found.cause, found.node, found.fault, found.unknown) == ("straggler", 1, True, ())
    unsure = explained(*ranks, clocks=(0.0, None))
    assert (unsure.cause, unsure.node, unsure.fault) == ("straggler", 1, False)
    wording("\n".join(unsure.unknown))


def test_a_rank_that_is_last_and_delays_nobody_is_not_called_slow(wording):
    early, late = ([entered(seq, NOW - 6 + 0.1 * seq + lag) for seq in range(1, 61)] for lag in (0.0, 0.01))
    found = explained(rank(0, early, IN_SCRIPT, state="R"), rank(1, late, IN_SCRIPT, state="R"))
    assert facts(found) == ("none", None, False)
    wording(found.sentence)


def test_a_rank_that_computes_is_not_blocked():
    found = explained(rank(0, WAITS), rank(1, BEFORE, IN_SCRIPT, state="R"))
    assert facts(found) == ("missing", 1, False)


@pytest.mark.parametrize("other", [{"op": "broadcast"}, {"size": 7}])
def test_a_mismatch_names_the_rank_that_differs_and_both_calls(wording, other):
    odd = [*BEFORE, entered(8, NOW - 40, done=False, **other)]
    (file, line, op), *callers = IN_ALL_REDUCE
    called = [[file, line, other.get("op", op)], *callers]
    found = explained(rank(0, WAITS), rank(1, odd, called), rank(2, WAITS), rank(3, WAITS))
    assert facts(found) == ("mismatch", 1, True)
    wording(found.sentence)


def test_groups_in_different_order(wording):
    pair = [*BEFORE, entered(1, NOW - 40, group="1", done=False)]
    found = explained(rank(0, [*WAITS, entered(0, NOW - 59, group="1")]), rank(1, pair))
    assert (found.cause, found.fault) == ("order", True)
    wording(found.sentence)


def test_the_root_of_a_chain_of_waits_is_named():
    pair = [*BEFORE, entered(1, NOW - 40, group="1", done=False)]
    root = [*BEFORE, entered(0, NOW - 59, group="1")]
    assert facts(explained(rank(0, WAITS), rank(1, pair), rank(2, root, IN_SCRIPT))) == ("missing", 2, True)


def test_each_cause_has_a_row_in_the_guide_to_which_the_sentence_leads():
    rows = re.findall(r"^\| (`.+?) \|", GUIDE.read_text(), re.M)
    assert {*get_args(Cause)} == {cause for row in rows for cause in re.findall("`([a-z_]+)`", row)}


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (rank(1, BEFORE, IN_SCRIPT, state="T"), "stopped_process"),
        (rank(1, BEFORE, IN_SCRIPT) | {"samples": [{"time": NOW, "threads": None}], "unknown": "gone"}, "ended_early"),
        (rank(1, [], IN_SCRIPT) | {"group_at": None, "unknown": "it has no process group"}, "no_group"),
        (rank(1, BEFORE, [["/usr/lib/python3.11/threading.py", 1590, "_shutdown"]]), "missing"),
        (rank(1, BEFORE, [[f"{TORCH}serialization.py", 9, "save"], *IN_SCRIPT]), "checkpoint"),
        (rank(1, BEFORE, IN_LOADER) | {"children": [{"state": "S", "threads": [IN_WORKER]}]}, "data_loader"),
    ],
)  # fmt: skip
def test_what_a_missing_rank_does_is_the_cause(wording, culprit, cause):
    waits = [] if cause == "no_group" else WAITS
    found = explained(rank(0, waits), culprit)
    assert facts(found) == (cause, 1, True)
    wording(found.sentence)


def test_a_rank_that_does_not_answer_is_named_only_where_all_others_wait(wording):
    silent = rank(1, [], IN_SCRIPT, state="R") | {"unknown": "its flight recorder did not answer within 1 s"}
    found = explained(rank(0, WAITS), silent, rank(2, WAITS))
    unknown = f"which collectives rank 1 (node 0) has entered: {silent['unknown']}"
    assert (facts(found), found.unknown) == (("missing", 1, True), (unknown,))
    wording(found.sentence)
    assert explained(rank(0, WAITS), silent, silent | {"rank": 2}).rank is None


def steps(late_s: float, count: int = 30, clock_s: float = 0.0) -> list[dict[str, Any]]:
    return [entered(seq, NOW - 60 + seq * 0.2 + late_s + clock_s) for seq in range(1, count)]


def test_a_straggler_is_named_with_its_lag(wording):
    found = explained(rank(0, steps(0)), rank(1, steps(0.001)), rank(2, steps(0.1), IN_SCRIPT), rank(3, steps(0)))
    assert facts(found) == ("straggler", 2, True)
    wording(found.sentence)


def test_clocks_that_differ_make_no_straggler():
    ranks = (rank(0, steps(0)), rank(1, steps(0.001)), rank(2, steps(0, clock_s=0.1)), rank(3, steps(0, clock_s=0.1)))
    assert facts(explained(*ranks, clocks=(0.0, 0.1)))[0] == "unknown"


def linked(view: Any, *links: list[Any]) -> Any:
    return view | {"samples": [one | {"links": [*links]} for one in view["samples"]]}


def test_a_link_that_is_down_is_named_and_no_rank(wording):
    """Some ranks are in the next collective, as their part of the last one arrived."""
    ahead = [*BEFORE, entered(8, NOW - 40, op="reduce"), entered(9, NOW - 39, done=False)]
    behind = [*BEFORE, entered(8, NOW - 40, op="reduce", done=False)]
    to_1, to_0 = ["0A", "0B", 90, 7], ["0B", "0A", 0, 0]
    found = explained(
        linked(rank(0, ahead), to_1), rank(1, ahead), linked(rank(2, behind), to_0), linked(rank(3, behind), to_0)
    )
    assert (facts(found), found.node) == (("network", None, True), None)
    wording(found.sentence)
    elsewhere = linked(rank(0, BEFORE, state="R"), ["0A", "7F", 90, 15])  # a service that no longer answers
    assert facts(explained(elsewhere, rank(1, BEFORE))) == ("unknown", None, False)
    # Rank 1 does not answer, so it may be at the other end, or not.
    unsure = explain_ranks(read_answer({"node": 0, "ranks": [linked(rank(0, WAITS), ["0A", "7F", 90, 15])]}), 2)
    assert facts(unsure) == ("network", None, False)
    wording(unsure.sentence)
    ends = ["0A", "0B", "0C", "0D"]  # of four nodes; two links are down
    nodes = [
        {"node": node, "ranks": [linked(rank(node, WAITS), [ends[node], ends[node ^ 1], 90, 7])]} for node in range(4)
    ]
    wording(explain_ranks([view for node in nodes for view in read_answer(node)], 4).sentence)
    short = [*BEFORE, entered(8, NOW - 8, done=False)]
    ranks = (linked(rank(0, short), to_1), rank(1, short), linked(rank(2, short), to_0), rank(3, short))
    assert facts(explained(*ranks)) == ("network", None, False)
    joining = (linked(rank(0, []), to_1), rank(1, []), linked(rank(2, []), to_0), rank(3, []))
    assert facts(explained(*joining)) == ("network", None, True)


def test_a_link_that_is_slow_is_named(wording):
    now = [*BEFORE, entered(8, NOW - 0.5, done=False)]
    ranks = [linked(rank(0, now), ["0A", "0B", 90, 1]), rank(1, now), linked(rank(2, now), ["0B", "0A", 0, 0])]
    found = explained(*ranks, rank(3, now))
    assert facts(found) == ("network", None, False)
    wording(found.sentence)
    assert facts(explained(linked(ranks[0], ["0A", "0B", 0, 0]), *ranks[1:], rank(3, now)))[0] != "network"


def test_a_rank_that_is_not_blocked_is_a_wait_and_no_fault(wording):
    evaluates = rank(1, BEFORE, IN_SCRIPT, state="R")
    evaluates["samples"][0]["threads"] = [[["/home/me/dataset.py", 91, "read"], *IN_SCRIPT[1:]]]
    found = explained(rank(0, WAITS), evaluates)
    assert facts(found) == ("missing", 1, False)
    wording(found.sentence)
    wakes = rank(1, BEFORE, IN_SCRIPT)
    for number, sample in enumerate(wakes["samples"]):
        sample["switches"] = 100 * number
    assert facts(explained(rank(0, WAITS), wakes)) == ("missing", 1, False)
    polls = rank(1, BEFORE, IN_LOADER)  # a stalled loader wakes up now and then
    polls["samples"][0]["threads"] = [[["/usr/lib/python3.11/selectors.py", 4, "select"], *IN_LOADER]]
    assert facts(explained(rank(0, WAITS), polls)) == ("data_loader", 1, True)


def test_send_and_recv(wording):
    def receives(number: int) -> Any:
        return rank(number, BEFORE, [[f"{TORCH}distributed/distributed_c10d.py", 9, "recv"], *IN_SCRIPT])

    found = explained(*map(receives, range(4)))
    assert facts(found) == ("send_recv", None, False)
    wording(found.sentence)
    sender = rank(1, BEFORE, IN_SCRIPT, wchan="hrtimer_nanosleep")
    found = explained(receives(0), sender, receives(2), receives(3))
    assert facts(found) == ("missing", 1, False)
    wording(found.sentence)
    assert explained(receives(0), sender, sender | {"rank": 2}, receives(3)).rank is None


def test_a_slow_node_is_named_if_its_ranks_are_last_by_turns(wording):
    def late(even: bool) -> list[dict[str, Any]]:
        return [entered(seq, NOW - 60 + seq * 0.2 + (0.1 if even == (seq % 2 == 0) else 0.05)) for seq in range(1, 30)]

    slow = (rank(2, late(True), IN_SCRIPT), rank(3, late(False), IN_SCRIPT))
    found = explained(rank(0, steps(0)), rank(1, steps(0.001)), *slow)
    assert (facts(found), found.node) == (("straggler", None, True), 1)
    wording(found.sentence)


def test_ranks_that_sleep_do_not_wait_for_the_last_one():
    def steps(late_s: float) -> list[dict[str, Any]]:
        return [entered(seq, NOW - 60 + seq * 0.2 + late_s) for seq in range(1, 30)]

    late = rank(1, steps(0.1), IN_SCRIPT)
    assert facts(explained(rank(0, steps(0)), late)) == ("straggler", 1, True)
    asleep = rank(0, steps(0), IN_SCRIPT, wchan="hrtimer_nanosleep")
    assert facts(explained(asleep, late))[1:] == (None, False)


def test_where_nan_began(wording):
    def seen(number: int, step: int, attempt: int = 1) -> Event:
        told = {"what": "loss"}
        return Event(event="not_finite", time=NOW, node=0, rank=number, step=step, attempt=attempt, facts=told)

    found = explain_not_finite([seen(0, 13), seen(1, 12), seen(2, 13), seen(3, 2, attempt=0)])
    assert found is not None
    assert facts(found) == ("nan", 1, True)
    wording(found.sentence)
    restarted = Event(event="ranks_started", time=NOW + 1, node=0, attempt=2)
    assert explain_not_finite([seen(0, 12), restarted]) is None
    started_again = Event(event="node_started", time=NOW + 1, node=0)
    assert of_last_start([seen(0, 12), started_again]) == [started_again]
    both = explain_not_finite([seen(0, 12), seen(1, 12)])
    assert both is not None
    assert both.rank is None
    assert explain_not_finite([]) is None
    data = Outcome(code=65, cause="error", message="rank 0 exited with 65", node=0, rank=0)
    assert facts(explain_outcome(data, (), "", [seen(1, 12)], 2)) == ("nan", 1, True)
    later = explain_outcome(replace(data, code=1), (), "", [seen(1, 12)], 2)  # perhaps for another reason
    assert (facts(later), "step 12" in later.sentence) == (("failed", 0, True), True)


def test_a_lost_node_is_named_with_the_end_of_its_log_and_no_rank(tmp_path: Path, wording: Wording) -> None:
    run = Path(make(tmp_path / "runs", "night", NOW).folder)
    for node in (0, 1):
        (run / f"node-{node}").mkdir()
        (run / f"node-{node}/node.log").write_text(f"[node{node}] the last line\n")
    lost = Outcome(code=137, cause="node_lost", message="node 1 was lost: its ddprun stopped responding", node=1)
    lost.write(run / "node-0")
    found = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (found["cause"], found["rank"], found["node"]) == ("node_lost", None, 1)
    assert found["evidence"] == ["[node1] the last line"]
    wording(ddpctl("explain", "night").stdout)


def test_nodes_that_lost_each_other_are_explained_by_their_network(tmp_path: Path, wording: Wording) -> None:
    run = Path(make(tmp_path / "runs", "night", NOW).folder)
    for node, lost in enumerate((1, 0)):
        (run / f"node-{node}").mkdir()
        Outcome(code=137, cause="node_lost", message=f"node {lost} was lost", node=lost).write(run / f"node-{node}")
    found = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (found["cause"], found["rank"], found["fault"]) == ("network", None, True)
    wording(found["sentence"])
    why = Outcome(code=69, cause="unavailable", message="node 0 does not answer", node=1)
    why.write(run / "node-1")
    assert json.loads(ddpctl("explain", "night", "--json").stdout)["sentence"] == why.message


@pytest.mark.parametrize("printed", ["", "epoch 1\n"])
def test_a_harmless_warning_of_torch_is_no_evidence(printed: str, tmp_path: Path, wording: Wording) -> None:
    node = Path(make(tmp_path / "runs", "night", NOW).folder) / "node-0"
    node.mkdir()
    Outcome(code=7, cause="error", message="rank 1 exited with 7", node=0, rank=1).write(node)
    warning = (
        "[W1125 10:31:07.123456789 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. "
        "err=-3\n"
    )
    (node / "rank-1.log").write_text(f"{warning}{printed}[rank1]:{warning}")
    found = json.loads(ddpctl("explain", "night", "--json").stdout)
    assert (found["cause"], found["rank"], len(found["evidence"])) == ("failed", 1, 1)
    wording(found["evidence"][0])
    (node / "rank-1.log").unlink()
    assert json.loads(ddpctl("explain", "night", "--json").stdout)["evidence"] == [], "nothing is known of its log"


def test_an_end_is_explained_by_its_outcome_its_last_words_and_who_ended_before(wording):
    failed = Outcome(code=1, cause="error", message="rank 0 on node 0 exited with 1: X", node=0, rank=0, step=4)
    found = explain_outcome(failed, (), "one\nOSError: [Errno 28] No space left on device\n", (), 2)
    assert (facts(found), found.evidence[-1][:7]) == (("disk_full", 0, True), "OSError")
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
    found = explain_outcome(lost, (), "", exits, 4)
    assert (facts(found), found.node) == (("ended_early", 3, True), 1)
    wording(found.sentence)
    assert facts(explain_outcome(lost, (), "", exits[1:], 4)) == ("failed", 0, True)
    done = Outcome(code=0, cause="ok", message="every rank exited with 0")
    assert facts(explain_outcome(done, (), "", (), 4)) == ("none", None, False)


def test_a_hang_that_was_killed_is_explained_by_what_was_kept():
    hung = Outcome(code=144, cause="hang", message="rank 1 on node 0 hung", node=0, rank=1)
    kept = read_answer({"node": 0, "ranks": [rank(0, WAITS), rank(1, BEFORE, IN_SCRIPT)]})
    assert facts(explain_outcome(hung, kept, "", (), 2)) == ("missing", 1, True)
    assert explain_outcome(hung, (), "", (), 2).unknown
