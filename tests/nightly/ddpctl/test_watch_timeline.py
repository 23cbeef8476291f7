"""Where a run's time went, from its nodes' events; and how it is drawn."""

from dataclasses import replace

from tests.unit.ddpctl.records import run_of
from tests.unit.ddpctl.test_watch_timeline import NOBODY, START, both, drawn, event, timeline

from ddpctl.commands.watch import lines
from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_status import RunStatus
from ddpctl.watch.history import History
from ddpctl.watch.timeline import (
    Span,
    count_restarts,
    phase_shares,
    phase_spans,
    phase_totals,
    timeline_events,
)


def test_the_queue_ends_with_the_first_pod_whatever_became_of_the_others() -> None:
    """Node 1's pod was replaced at 150, and what its first one has told went with it."""
    later = [start for start in START if start.node == 0] + [event(152, "node_started", node=1)]
    run, placed = run_of(created=100, kind="kubernetes", job=JobSpec(nodes="2")), {0: (104,), 1: (150,)}
    spans = phase_spans(later, run, "training", placed=placed, now=200, history=NOBODY)
    assert (spans[0].phase, spans[0].end) == ("queue", 104)


def test_what_was_pulled_after_the_queue_and_what_no_queue_is() -> None:
    assert drawn(START, placed=(104,))[:2] == [("queue", 100, 104), ("start", 104, 110)]
    assert drawn(START, queued=False)[0] == ("start", 100, 110)
    assert drawn([], state="pending") == [("queue", 100, 200)]
    assert drawn([], state="starting", placed=(104,)) == [("queue", 100, 104), ("start", 104, 200)]


def test_evaluations_checkpoints_and_a_restore_are_told_apart() -> None:
    events = [
        *START,
        event(119, "checkpoint_loaded", rank=0, seconds=2.0),
        event(130, "epoch_ended", rank=0, evaluation_s=3.0),
        event(135, "checkpoint_saved", rank=0, seconds=4.0, waited_s=1.0),
        event(135, "checkpoint_saved", rank=1, seconds=4.0, waited_s=1.0),
        event(150, "training_ended", rank=0),
        *both(152, "node_ended"),
    ]
    drawing = drawn(sorted(events, key=lambda start: start.time))
    assert drawing[3:] == [
        ("import", 115, 117),
        ("restore", 117, 119),
        ("import", 119, 121),
        ("first step", 121, 122),
        ("training", 122, 127),
        ("evaluation", 127, 130),
        ("training", 130, 131),
        ("checkpoints", 131, 132),
        ("training", 132, 150),
        ("end", 150, 152),
    ]


SAVED = [event(140, "failed", cause="stopped"), *both(142, "node_ended")]
AGAIN = [event(start.time + 50, start.event, start.node, start.rank) for start in START]


def rows_of(*steps: tuple[float, float]) -> History:
    return History(nodes={0: tuple({"time": time, "ddp_last_step": step} for time, step in steps)})


def test_a_run_that_its_queue_starts_again_has_the_phases_of_each_start() -> None:
    first = [("queue", 100, 104), ("start", 104, 110)]
    saved = [("training", 122, 140), ("end", 140, 142)]
    waiting = drawn([*START, *SAVED], placed=(104,), state="pending")
    assert waiting[:2] + waiting[-3:] == [*first, *saved, ("queue", 142, 200)]
    drawing = drawn([*START, *SAVED], placed=(104, 157), state="starting")
    assert drawing[-2:] == [("queue", 142, 157), ("start", 157, 200)]
    steps = rows_of((139, 20), (173, 24))
    drawing = drawn([*START, *SAVED, *AGAIN], placed=(104, 157), history=steps)
    assert drawing[6:] == [
        *saved,
        ("queue", 142, 157),
        ("start", 157, 160),
        ("preflight", 160, 162),
        ("rendezvous", 162, 165),
        ("import", 165, 171),
        ("first step", 171, 172),
        ("lost", 172, 173),  # the history does not tell earlier that step 20 is passed
        ("training", 173, 200),
    ]
    assert count_restarts([*START, *SAVED, *AGAIN], {}) == 1
    assert count_restarts(START, {}) == 0


def test_a_start_that_was_killed_ends_with_its_last_sign_of_life_and_steps_taken_again_are_lost() -> None:
    steps = rows_of((130, 10), (139, 20), (173, 12), (180, 20), (190, 30))
    drawing = drawn([*START, *AGAIN], placed=(104, 157), history=steps)
    assert drawing[6:9] == [("training", 122, 139), ("queue", 139, 157), ("start", 157, 160)]
    assert drawing[-2:] == [("lost", 172, 180), ("training", 180, 200)]


def test_a_node_that_comes_back_is_no_new_start_of_the_run() -> None:
    back = [event(150, "failed", cause="node_lost"), event(155, "node_started", node=1, requeued_s=20.0)]
    drawing = drawn([*START, *back, *both(160, "rendezvous_done"), *both(165, "first_step")])
    assert drawing[5:] == [("training", 122, 150), ("lost", 150, 165), ("training", 165, 200)]
    assert count_restarts([*START, *back, *both(160, "rendezvous_done")], {}) == 0


def test_a_run_that_does_not_go_on_is_shown_until_its_last_sign_of_life() -> None:
    steps = rows_of((130, 10), (139, 20))
    for state in ("lost", "failed", "unknown"):
        assert drawn(START, history=steps, state=state)[-1] == ("training", 122, 139)  # type: ignore[arg-type]
    assert drawn(START, history=steps)[-1] == ("training", 122, 200)


def test_a_script_that_gives_no_sign_of_its_steps() -> None:
    mute = [start for start in START if start.event not in ("training_began", "first_step")]
    assert drawn([*mute, *both(180, "node_ended")])[3:] == [("import", 115, 116), ("running", 116, 180)]
    again = [*both(143, "rendezvous_done"), *both(145, "ranks_started"), *both(180, "node_ended")]
    drawing = drawn([*mute, event(140, "failed", cause="killed"), *again])
    assert drawing[4:] == [("running", 116, 140), ("lost", 140, 145), ("running", 145, 180)]


def test_nothing_is_lost_after_the_end_unless_the_ranks_are_started_anew() -> None:
    over = [*START, event(150, "training_ended", rank=0), event(151, "failed", cause="error")]
    assert drawn([*over, *both(152, "node_ended")])[5:] == [("training", 122, 150), ("end", 150, 152)]
    again = [event(152, "restart"), *both(155, "first_step")]
    assert drawn([*over, *again])[5:] == [
        ("training", 122, 150),
        ("end", 150, 152),
        ("lost", 152, 155),
        ("training", 155, 200),
    ]


def test_clocks_that_are_behind_do_not_turn_time_back() -> None:
    events = [event(90, "node_started"), event(111, "node_started", node=1), *START[2:]]
    assert drawn(events)[:2] == [("queue", 100, 111), ("preflight", 111, 112)]


def test_time_in_the_queue_is_in_no_percentage_and_times_count_from_the_first_start() -> None:
    again = event(175, "node_started", requeued_s=25.0)
    events = [*START, event(140, "signal", signal="SIGTERM"), again, event(175, "node_started", 1, requeued_s=25.0)]
    spans = (
        Span(phase="queue", begin=100, end=120),
        Span(phase="training", begin=120, end=150),
        Span(phase="queue", begin=150, end=170),
        Span(phase="start", begin=170, end=180),
    )
    assert phase_shares(spans) == {"queue": (40, None), "start": (10, 0.25), "training": (30, 0.75)}
    assert timeline_events(events)[-1] is again, "each node tells of it"
    run = timeline(events, spans, RunStatus(run="night", state="training", message=""))
    assert (run.begin, run.end) == (120, 180)
    title, _, *bars, _, first, second = lines(run, 78, plain=True)
    assert bars == [
        "queue         40 s                                  #################",
        "start         10 s   25 %                                           #########",
        "training      30 s   75 %  #########################",
    ]
    assert ("80 s" in title, "40 s of it in the queue" in title) == (True, True)
    assert (first.split()[:2], "SIGTERM" in first) == (["20", "s"], True)
    assert (second.split()[:2], "25 s" in second) == (["55", "s"], True)


def test_each_phase_has_a_bar_and_its_share_of_the_time() -> None:
    failed = event(140, "failed", message="rank 1 on node 0 was killed (SIGKILL)")
    events = [*START, failed, event(150, "recovered", seconds=10.0, steps_lost=4)]
    spans = (
        Span(phase="start", begin=100, end=110),
        Span(phase="import", begin=110, end=120),
        Span(phase="training", begin=120, end=140),
        Span(phase="lost", begin=140, end=150),
        Span(phase="training", begin=150, end=200),
    )
    status = RunStatus(run="night", state="training", message="2 of 2 nodes alive")
    assert phase_totals(spans) == {"start": 10, "import": 10, "training": 70, "lost": 10}
    title, *bars, first, second = lines(timeline(events, spans, status), 78, plain=True)
    assert bars == [
        "",
        "start         10 s   10 %  #####",
        "import        10 s   10 %       #####",
        "training      70 s   70 %            ##########     #########################",
        "lost          10 s   10 %                      #####",
        "",
    ]
    assert ("training" in title, "100 s" in title) == (True, True)
    assert (first.split()[:2], "rank 1 on node 0 was killed (SIGKILL)" in first) == (["40", "s"], True)
    assert (second.split()[:2], "10.0 s" in second, "4 steps" in second) == (["50", "s"], True, True)
    without_steps = tuple(replace(span, phase="running") if span.phase == "training" else span for span in spans)
    assert lines(timeline(events, without_steps, status), 78, plain=True)[-1].startswith("unknown: ")


def test_a_run_that_left_no_events() -> None:
    status = RunStatus(run="night", state="lost", message="it was killed", code=137)
    first, second = lines(timeline([], (), status), 80, plain=True)
    assert [fact in first for fact in ("lost", "exit code 137", "it was killed")] == [True] * 3
    assert second


def test_a_long_cause_is_cut_where_it_can_be_seen_and_moves_no_cursor() -> None:
    failed = event(140, "failed", message="\x1b[2Jrank 1 on node 0 " + "was killed " * 9)
    status = RunStatus(run="night", state="failed", message="\x1b]0;title\x07", code=1)
    spans = (Span(phase="training", begin=100, end=200),)
    drawn_in = {plain: lines(timeline([failed], spans, status), 60, plain=plain)[-1] for plain in (True, False)}
    assert {plain: (len(line), line[-1]) for plain, line in drawn_in.items()} == {True: (60, "."), False: (60, "…")}
    for line in (*drawn_in.values(), lines(timeline([], (), status), 60, plain=True)[0]):
        assert line.isprintable()
