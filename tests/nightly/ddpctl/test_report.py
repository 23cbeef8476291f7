"""The report: its axes, plots and tables from values, and that nothing in it is fetched, run or taken for HTML."""

import re
from dataclasses import replace

from tests.unit.ddpctl.test_watch_timeline import SPANS, START, history, timeline

from ddpctl.report.charts import Line, Mark, clock, gantt_chart, history_charts, line_chart, short, ticks, time_ticks
from ddpctl.report.html import MOST_EVENTS, environments_table, event_rows, render_page
from ddpctl.runs.run_status import RunStatus
from ddpctl.text import one_line
from ddpctl.watch.history import History
from ddpctl.watch.timeline import Span
from ddpwire.events import Event


def test_axes_have_round_numbers() -> None:
    assert ticks(0, 1.7) == [0.0, 0.5, 1.0, 1.5]
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(3, 3) == [3]
    assert time_ticks(64) == [0, 10, 20, 30, 40, 50, 60]
    assert time_ticks(7200) == [0, 1200, 2400, 3600, 4800, 6000, 7200]
    assert len(time_ticks(40 * 86400)) <= 9
    assert [clock(seconds) for seconds in (0.25, 45, 125, 7451)] == ["0.25 s", "45 s", "2:05", "2:04:11"]
    assert [short(value) for value in (0.5, 1250, 2_500_000, 0)] == ["0.5", "1.25 k", "2.5 M", "0"]


def test_a_line_chart_has_marks_and_tooltips() -> None:
    chart = line_chart(
        "Loss",
        [Line(name="loss", style="loss", points=[(0, 2.0), (50, 1.0), (100, 0.0)])],
        seconds=100,
        marks=[Mark(at=50, style="bad", text="rank 1 <died>")],
    )
    assert chart.lines == [("loss", "64.0,18.9 506.0,107.4 948.0,196.0")]
    assert chart.marks == [("bad", 506.0, "50 s: rank 1 <died>")]
    assert chart.hovers == [
        (64.0, 221.0, "0.0 s: loss 2"),
        (285.0, 442.0, "50 s: loss 1"),
        (727.0, 221.0, "100 s: loss 0"),
    ]


def test_a_line_of_one_point_is_a_dot() -> None:
    chart = line_chart("Loss", [Line(name="loss", style="loss", points=[(50, 1.0)])], seconds=100)
    assert chart.dots == [("loss", 506.0, 18.9)]


def test_stacked_areas_lie_on_each_other() -> None:
    lines = [Line(name=name, style=name, points=[(0, 50.0), (100, 50.0)]) for name in ("low", "high")]
    chart = line_chart("Shares", lines, seconds=100, unit=" %", stacked=True)
    assert chart.areas == [
        ("low", "64.0,103.0 948.0,103.0 948.0,196.0 64.0,196.0"),
        ("high", "64.0,10.0 948.0,10.0 948.0,103.0 64.0,103.0"),
    ]
    assert (chart.lines, chart.legend) == ([], [("low", "low"), ("high", "high")])
    assert chart.values[-1] == (10.0, "100 %")


def test_each_phase_has_a_bar_of_its_length() -> None:
    chart = gantt_chart(SPANS, {"start": (10, 0.1), "training": (90, 0.9)}, begin=100, seconds=100)
    assert [text for _, text in chart.labels] == ["start  10 s  10 %", "training  90 s  90 %"]
    assert [(phase, x, width) for phase, x, _, width, _ in chart.bars] == [
        ("start", 200.0, 74.8),
        ("training", 274.8, 673.2),
    ]


def test_a_wait_in_the_queue_has_no_share_and_the_first_one_no_bar() -> None:
    first, again = Span(phase="queue", begin=60, end=100), Span(phase="queue", begin=150, end=160)
    chart = gantt_chart((first, *SPANS, again), {"queue": (50, None)}, begin=100, seconds=100)
    assert [text for _, text in chart.labels] == ["queue  50 s"]
    assert [x for _, x, *_ in chart.bars] == [574.0]


def test_the_axis_of_the_loss_begins_at_zero_only_near_zero() -> None:
    for near, lowest in ((0.0, "0"), (4.0, "4")):
        rows = tuple(row | {"ddp_loss": near + row["ddp_loss"]} for row in history().nodes[0])
        charts = history_charts(History(nodes={0: rows}), begin=100, seconds=100, marks=[])
        ((_, label), *_) = next(chart.values for chart in charts if chart.title == "Loss")
        assert label.partition(".")[0] == lowest, label


def test_nodes_that_have_the_same_are_one_column() -> None:
    here = {"host": "box1", "torch": "2.10"}
    same = environments_table({0: here, 1: {**here, "host": "box2"}, 3: here})
    assert same == {"nodes": ["nodes 0, 1 and 3"], "rows": [("host", ["box1, box2"]), ("torch", ["2.10"])]}
    other = environments_table({0: here, 1: {**here, "torch": "2.9"}})
    assert other["nodes"] == ["node 0", "node 1"]
    assert other["rows"][1] == ("torch", ["2.10", "2.9"])


def test_of_very_many_events_the_first_and_the_last_are_listed() -> None:
    many = [Event(event="checkpoint_saved", time=100.0 + index, node=0, rank=0, step=index) for index in range(1000)]
    rows = event_rows(many, 100, one_line)
    assert len(rows) == MOST_EVENTS + 1
    assert rows[0] == ("0.0 s", "node 0, rank 0", "checkpoint saved", "step 0")
    assert f"{1000 - MOST_EVENTS} events" in rows[MOST_EVENTS // 2]
    assert rows[-1] == ("16:39", "node 0, rank 0", "checkpoint saved", "step 999")
    assert len(event_rows(many[:MOST_EVENTS], 100, one_line)) == MOST_EVENTS


def test_events_have_their_causes_and_no_control_characters() -> None:
    facts = (
        {"cause": "killed", "status": -9},
        {"cause": "error", "status": 3, "step": None},
        {"cause": "flooded", "status": "x", "message": "\x1b[2J"},
    )
    shown = ("SIGKILL", "3", "\\x1b[2J")
    many = [Event(event="rank_exited", time=100.0, node=0, rank=1, facts=fact) for fact in facts]
    cells = [row[-1] for row in event_rows(many, 100, one_line) if row[-2] == "rank exited"]
    assert len(cells) == 3
    for cell, fact in zip(cells, shown, strict=True):
        assert (cell.isprintable(), fact in cell) == (True, True)
    assert environments_table({0: {"host": "a", "number of ranks": "2"}})["rows"][1] == ("ranks on the node", ["2"])


def test_only_what_was_reported_is_plotted() -> None:
    charts = history_charts(history(), begin=100, seconds=100, marks=[])
    assert [chart.title for chart in charts] == [
        "Loss",
        "Throughput, samples per second",
        "Where the time of a step goes",
    ]
    assert charts[2].legend == [("forward", "forward"), ("comm_exposed", "waiting for the other ranks")]
    assert history_charts(History(nodes={}), begin=0, seconds=10, marks=[]) == []
    assert history_charts(history(1), begin=0, seconds=10, marks=[]) == []


def test_the_page_has_its_tiles_and_begins_with_the_last_output() -> None:
    failed = RunStatus(run="night", state="failed", message="rank 0 failed", code=1)
    report = replace(
        timeline([*START], SPANS, failed), history=history(), last_lines="Traceback\n", last_lines_of="rank 0 on node 0"
    )
    check = {"check": "doctor", "lines": ["node 0  node 1", "x"], "time": 140}
    text = render_page(report, checks=[check])
    assert re.search(r"<h2>ddpctl doctor of [^<]*</h2>\n<pre>node 0  node 1\n", text)
    assert "rank 0 on node 0" in re.findall("<h2>(.*?)</h2>", text)[0]
    assert re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', text) == [
        ("100 s", "from launch to end"),
        ("49", "steps"),
        ("0.4000", "loss"),
        ("17.42", "samples per second, training"),
        ("90 %", "goodput"),
        ("0", "restarts"),
    ]
