"""The report: its axes, plots and tables from values, and that nothing in it is fetched, run or taken for HTML."""

from dataclasses import replace
from html.parser import HTMLParser

from tests.unit.ddpctl.test_watch_timeline import START, timeline

from ddpctl.job.spec import JobSpec
from ddpctl.report.html import configuration_table, render_page
from ddpctl.runs.run_status import RunStatus
from ddpctl.watch.history import History
from ddpctl.watch.timeline import Span
from ddpwire.events import Event

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
    text = render_page(report, why=hostile(), checks=[check], values=["s3cret-value"], unsought=[hostile()])
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
