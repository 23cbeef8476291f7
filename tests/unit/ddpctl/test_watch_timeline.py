"""The nodes' histories as one, where a run's time went, and how it is drawn."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names
from tests.unit.ddpctl.records import run_of
from tests.unit.ddpctl.test_run_store import make

from ddpctl.job.spec import JobSpec
from ddpctl.report.html import configuration_table, render_page
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus, State
from ddpctl.watch.history import History
from ddpctl.watch.timeline import (
    Span,
    Timeline,
    count_restarts,
    describe_event,
    phase_spans,
    timeline_events,
)
from ddpwire.events import Event
from ddpwire.history import Row
from ddpwire.run_files import Outcome

NOBODY = History(nodes={})


def event(time: float, name: str, node: int = 0, rank: int | None = None, **facts: object) -> Event:
    seconds = facts.pop("seconds", None)
    return Event(event=name, time=time, node=node, rank=rank, seconds=seconds, facts=facts)  # type: ignore[arg-type]


def both(time: float, name: str) -> list[Event]:
    """Node 1 is a second later; the run is where its last node is."""
    return [event(time - 1, name), event(time, name, node=1)]


START = [
    *both(110, "node_started"),
    *both(112, "preflight_done"),
    *both(115, "rendezvous_done"),
    *both(116, "ranks_started"),
    event(120, "training_began", rank=0),
    event(121, "training_began", node=1, rank=1),
    *both(122, "first_step"),
]


def drawn(
    events: list[Event],
    *,
    history: History = NOBODY,
    placed: tuple[float, ...] = (),
    queued: bool = True,
    state: State = "training",
) -> list[tuple[str, float, float]]:
    run = run_of(created=100, kind="slurm" if queued else "local", job=JobSpec(nodes="2"))
    spans = phase_spans(events, run, state, placed=dict.fromkeys((0, 1), placed), now=200, history=history)
    assert [span.end for span in spans[:-1]] == [span.begin for span in spans[1:]], "no gap, nothing twice"
    return [(span.phase, span.begin, span.end) for span in spans]


def test_a_launch_has_its_phases_until_now() -> None:
    assert drawn(START) == [
        ("queue", 100, 110),
        ("preflight", 110, 112),
        ("rendezvous", 112, 115),
        ("import", 115, 121),
        ("first step", 121, 122),
        ("training", 122, 200),
    ]


def test_a_failure_costs_the_time_until_the_ranks_are_where_they_had_been() -> None:
    rows: tuple[Row, ...] = tuple(
        {"time": float(time), "ddp_last_step": float(step)}
        for time, step in ((125, 10), (130, 20), (135, 20), (152, 12), (155, 16), (158, 21), (160, 25))
    )
    events = [
        *START,
        event(140, "failed"),
        event(141, "failed", node=1),
        *both(143, "rendezvous_done"),
        event(149, "training_began", rank=0),
        event(149, "training_began", node=1, rank=1),
        *both(150, "first_step"),
    ]
    phases = drawn(events, history=History(nodes={0: rows}))
    assert phases[5:] == [("training", 122, 130), ("lost", 130, 158), ("training", 158, 200)]


def test_a_restart_counts_once_the_ranks_have_started_again() -> None:
    commands = [*START, event(140, "restart"), event(150, "node_ended")]  # it did not come to it
    assert count_restarts(commands, {}) == 0
    again = Event(event="ranks_started", time=145, node=0, attempt=2, facts={})
    assert count_restarts([*commands[:-1], again, commands[-1]], {}) == 1


def test_a_stop_that_was_asked_for_is_no_loss() -> None:
    stopped = [event(150, "failed", cause="stopped"), event(150, "failed", node=1, cause="stopped")]
    assert drawn([*START, *stopped, *both(152, "node_ended")])[5:] == [("training", 122, 150), ("end", 150, 152)]
    ranks = [event(148, "stopping", rank=0), *stopped]
    assert drawn([*START, *ranks, *both(152, "node_ended")])[5:] == [("training", 122, 148), ("end", 148, 152)]
    asked_for = describe_event(event(150, "failed", cause="stopped", message="stopped by SIGTERM"))
    lost = describe_event(event(150, "failed", cause="killed", message="rank 0 on node 0 was killed by SIGKILL"))
    assert ["failed" in text for text in (asked_for, lost)] == [False, True]


def test_a_stop_is_named_by_what_reached_ddprun_and_by_what_the_ranks_get() -> None:
    deadline = event(150, "signal", reason="the run's deadline is near", sent="SIGUSR2")
    request = event(160, "signal", signal="SIGTERM", sent="SIGUSR2")
    before, same = event(150, "signal", signal="SIGTERM"), event(150, "signal", signal="SIGTERM", sent="SIGTERM")
    assert "SIGTERM" not in describe_event(deadline)
    for described, named in ((deadline, ("deadline", "SIGUSR2")), (request, ("SIGTERM", "SIGUSR2"))):
        assert_names(describe_event(described), *named)
    assert describe_event(before) == describe_event(same)  # a record of an earlier version
    assert timeline_events([deadline, replace(deadline, node=1), replace(request, time=150.1)]) == (
        deadline,
        replace(request, time=150.1),
    )


def timeline(events: list[Event], spans: tuple[Span, ...], status: RunStatus) -> Timeline:
    run = run_of(created=100, target="local", folder="/s/night")
    known = {"events": tuple(events), "history": NOBODY, "environments": MappingProxyType({})}
    return Timeline(run=run, status=status, now=200, spans=spans, **known)


ROWS = {
    0: ({"time": 0.0}, {"time": 10.0, "n": 100.0, "loss": 2.0}, {"time": 20.0, "n": 300.0}, {"time": 40.0, "n": 100.0}),
    1: ({"time": 0.0, "n": 0.0}, {"time": 20.0, "n": 100.0, "loss": 1.0}),
}
COURSE = History(nodes=ROWS)  # type: ignore[arg-type]


def test_a_steady_counter_has_a_steady_rate_whatever_the_moments() -> None:
    """Moments go evenly to the last row, counters may begin anew, and of gauges the largest counts."""
    assert (COURSE.begin, COURSE.end) == (0.0, 40.0)
    assert COURSE.moments(3) == (0.0, 20.0, 40.0)
    assert COURSE.moments(100) == pytest.approx((0.0, 40 / 3, 80 / 3, 40.0))
    assert [History(nodes=nodes).moments(9) for nodes in ({}, {0: ({"time": 3.0},)})] == [(), ()]
    moments = (0.0, 10.0, 20.0, 40.0)
    assert COURSE.rate("n", moments) == ((50 + 100) / 10, (50 + 200) / 10, (0 + 100) / 20)
    assert (COURSE.rate("none", moments), NOBODY.rate("n", moments)) == ((None, None, None), ())
    steady = History(nodes={0: tuple({"time": float(second), "n": 100.0 * second} for second in range(88))})
    assert steady.rate("n", steady.moments(60)) == pytest.approx([100.0] * 59)
    assert COURSE.gauge("loss", (0.0, 10.0, 20.0)) == (None, 2.0, 2.0)
    assert (COURSE.last("loss"), COURSE.last("none"), COURSE.total("n")) == (2.0, None, 200.0)
    assert (COURSE.points("n")[0], COURSE.points("none")) == ((0.0, 0.0), [])


DONE = RunStatus(run="night", state="succeeded", message="every rank exited with 0", code=0)
SPANS = (Span(phase="start", begin=100, end=110), Span(phase="training", begin=110, end=200))


def history(number: int = 50) -> History:
    rows = tuple(
        {
            "time": 110.0 + index,
            "ddp_last_step": float(index),
            "ddp_samples_total": 32.0 * index,
            "ddp_loss": 2.0 / (1 + index // 10),
            "ddp_step_phase_seconds_total:forward": 0.6 * index,
            "ddp_step_phase_seconds_total:comm_exposed": 0.3 * index,
            "ddp_productive_seconds_total": 0.9 * index,
            "ddp_unproductive_seconds_total:startup": 5.0,
        }
        for index in range(number)
    )
    return History(nodes={0: rows})


def test_the_configuration_is_shown_without_secrets() -> None:
    run = replace(
        timeline([], SPANS, DONE).run,
        job=JobSpec(
            nodes="2", env={"LR": "1", "HF_TOKEN": "abc"}, command=("t.py", "--password", "pw", "plain-secret")
        ),
        options={"python": "/venv/bin/python", "registry_token": "xyz", "login": None},
    )
    assert list(configuration_table(run, ["plain-secret"]).items()) == [
        ("program", "t.py --password '[REDACTED]' '[REDACTED]'"),
        ("nodes", "2"),
        ("gpus", "1"),
        ("device", "auto"),
        ("env LR", "1"),
        ("env HF_TOKEN", "[REDACTED]"),
        ("target", "local"),
        ("local python", "/venv/bin/python"),
        ("local registry_token", "[REDACTED]"),
        ("folder", "/p"),
        ("checkpoints", "/s/night/checkpoints"),
        ("started by", "ddpctl 0.1.0"),
    ]


def test_a_report_has_no_value_of_a_variable_that_looks_secret(tmp_path: Path) -> None:
    run = make(tmp_path / "runs", "night", 1.0)
    run_store.save(replace(run, job=replace(run.job, env={"HF_TOKEN": "abcdef123", "LR": "0.125"})))
    node = Path(run.folder) / "node-0"
    node.mkdir()
    Outcome(code=1, cause="error", message="abcdef123 is wrong, 0.125 is not", node=0, rank=0).write(node)
    assert ddpctl("report", "night", "-o", "page.html", cwd=tmp_path).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert ("abcdef123" in page, "0.125 is not" in page) == (False, True)


def test_whatever_a_run_writes_is_escaped() -> None:
    """30 texts, each with another number, are planted in all values that come from a run, a node or a log."""
    planted: list[str] = []

    def hostile() -> str:
        planted.append(f"</pre></title><script>alert({len(planted)})</script>&\"'{{{{7*7}}}}<svg onload=x>")
        return planted[-1]

    events = [
        Event(event="failed", time=150, node=0, facts={"message": hostile()}),
        Event(event="failed", time=151, node=0, rank=1, attempt=2, facts={"message": hostile(), "cause": hostile()}),
        Event(event=hostile(), time=152, node=0, facts={hostile(): 1, "x": hostile()}),
        Event(event="checkpoint_failed", time=153, node=0, facts={"message": hostile(), "y": [hostile()]}),
        Event(event="signal", time=154, node=0, facts={"signal": hostile()}),
        Event(event="rank_exited", time=155, node=0, rank=1, facts={"cause": hostile(), "status": hostile()}),
    ]
    failed = RunStatus(run="night", state="failed", message=f"rank 0 said {hostile()}", code=1)
    report = timeline([*START, *events], SPANS, failed)
    job = replace(report.run.job, env={hostile(): hostile()}, command=("t.py", hostile()))
    run = replace(
        report.run,
        name=f"night{hostile()}",
        target=hostile(),
        cwd=hostile(),
        checkpoint_dir=hostile(),
        version=hostile(),
        job=job,
        options={hostile(): hostile()},
    )
    report = replace(
        report,
        run=run,
        history=history(),
        last_lines=f"Traceback\n{hostile()}\n{hostile()} s3cret-value\n",
        last_lines_of=hostile(),
        silent=(hostile(),),
        environments={0: {"host": hostile(), hostile(): hostile()}},
    )
    check = {"check": "doctor", "lines": ["node 0  node 1", f"{hostile()} s3cret-value"], "time": 140}
    text = render_page(report, reason=hostile(), checks=[check], values=["s3cret-value"], unsought=[hostile()])
    assert len(planted) >= 30
    assert "s3cret-value" not in text
    page = Tags()
    page.feed(text)
    assert "script" not in page.tags
    assert not page.links, "nothing is fetched"
    assert not page.handlers
    written = "".join(page.texts)
    assert [number for number in range(len(planted)) if f"<script>alert({number})</script>&" not in written] == []
    assert "{{7*7}}" in written
    assert page.tags >= {"svg", "polyline", "rect", "table", "pre"}
    assert "default-src 'none'; style-src 'unsafe-inline'" in text


class Tags(HTMLParser):
    """The tags of a page, its texts, and the attributes that fetch or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "data", "xlink:href")]
        self.handlers += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
