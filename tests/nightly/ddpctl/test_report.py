"""The report: its axes, plots and tables from values, and that nothing in it is fetched, run or taken for HTML."""

import re

from tests.unit.ddpctl.test_report import SPANS, history

from ddpctl.report.html import MOST_EVENTS, environments_table, events_table
from ddpctl.report.svg import Line, Mark, clock, gantt_chart, history_plots, line_chart, short, ticks, time_ticks
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
    drawn = line_chart(
        [Line(name="loss", style="loss", points=[(0, 2.0), (50, 1.0), (100, 0.0)])],
        seconds=100,
        marks=[Mark(at=50, style="bad", words="rank 1 <died>")],
    )
    (polyline,) = re.findall(r'<polyline class="line loss" points="(.*?)"/>', drawn)
    assert polyline == "64.0,18.9 506.0,107.4 948.0,196.0"
    assert "<title>50 s: rank 1 &lt;died&gt;</title></line>" in drawn
    assert re.findall(r'class="hover".*?<title>(.*?)</title>', drawn) == [
        "0.0 s: loss 2",
        "50 s: loss 1",
        "100 s: loss 0",
    ]


def test_each_phase_has_a_bar_of_its_length() -> None:
    drawn = gantt_chart(SPANS, {"start": (10, 0.1), "training": (90, 0.9)}, begin=100, seconds=100)
    assert re.findall(r'<text class="label".*?>(.*?)</text>', drawn) == ["start  10 s  10 %", "training  90 s  90 %"]
    assert re.findall(r'<rect class="(.*?)" x="(.*?)" y=".*?" width="(.*?)"', drawn) == [
        ("bar phase-start", "200.0", "74.8"),
        ("bar phase-training", "274.8", "673.2"),
    ]


def test_a_wait_in_the_queue_has_no_share_and_the_first_one_no_bar() -> None:
    first, again = Span(phase="queue", begin=60, end=100), Span(phase="queue", begin=150, end=160)
    drawn = gantt_chart((first, *SPANS, again), {"queue": (50, None)}, begin=100, seconds=100)
    assert re.findall(r'<text class="label".*?>(.*?)</text>', drawn) == ["queue  50 s"]
    assert re.findall(r'<rect class="bar phase-queue" x="(.*?)"', drawn) == ["574.0"]


def test_the_axis_of_the_loss_begins_at_zero_only_near_zero() -> None:
    for near, lowest in ((0.0, "0"), (4.0, "4")):
        rows = tuple(row | {"ddp_loss": near + row["ddp_loss"]} for row in history().nodes[0])
        (chart,) = [
            chart
            for title, chart, _ in history_plots(History(nodes={0: rows}), begin=100, seconds=100, marks=[])
            if title == "Loss"
        ]
        found = re.findall(r'<text class="tick" x="56" .*?>(.*?)</text>', chart)
        assert found[0].partition(".")[0] == lowest, found


def test_nodes_that_have_the_same_are_one_column() -> None:
    here = {"host": "box1", "torch": "2.10"}
    same = environments_table({0: here, 1: {**here, "host": "box2"}, 3: here})
    assert "<th>nodes 0, 1 and 3</th>" in same
    assert "<tr><th>host</th><td>box1, box2</td></tr><tr><th>torch</th><td>2.10</td></tr>" in same
    other = environments_table({0: here, 1: {**here, "torch": "2.9"}})
    assert '<tr class="other"><th>torch</th><td>2.10</td><td>2.9</td></tr>' in other


def test_of_very_many_events_the_first_and_the_last_are_listed() -> None:
    many = [Event(event="checkpoint_saved", time=100.0 + index, node=0, rank=0, step=index) for index in range(1000)]
    rows = re.findall(r"<tr>(.*?)</tr>", events_table(many, 100, ()))
    assert len(rows) == MOST_EVENTS + 1
    assert rows[0] == "<td>0.0 s</td><td>node 0, rank 0</td><td>checkpoint saved</td><td>step 0</td>"
    assert f"{1000 - MOST_EVENTS} events" in rows[MOST_EVENTS // 2]
    assert rows[-1] == "<td>16:39</td><td>node 0, rank 0</td><td>checkpoint saved</td><td>step 999</td>"


def test_events_have_their_causes_and_no_control_characters() -> None:
    facts = (
        {"cause": "killed", "status": -9},
        {"cause": "error", "status": 3, "step": None},
        {"cause": "flooded", "status": "x", "message": "\x1b[2J"},
    )
    shown = ("SIGKILL", "3", "\\x1b[2J")
    many = [Event(event="rank_exited", time=100.0, node=0, rank=1, facts=one) for one in facts]
    cells = re.findall("<td>rank exited</td><td>(.*?)</td>", events_table(many, 100, ()))
    assert len(cells) == 3
    for cell, fact in zip(cells, shown, strict=True):
        assert (cell.isprintable(), fact in cell) == (True, True)
    assert "<th>ranks on the node</th><td>2</td>" in environments_table({0: {"host": "a", "number of ranks": "2"}})


def test_only_what_was_reported_is_plotted() -> None:
    found = history_plots(history(), begin=100, seconds=100, marks=[])
    assert [title for title, _, _ in found] == [
        "Loss",
        "Throughput, samples per second",
        "Where the time of a step goes",
    ]
    assert found[2][2] == (
        '<p class="key"><i class="forward"></i>forward<i class="comm_exposed"></i>waiting for the other ranks</p>'
    )
    assert history_plots(History(nodes={}), begin=0, seconds=10, marks=[]) == []
    assert history_plots(history(1), begin=0, seconds=10, marks=[]) == []
