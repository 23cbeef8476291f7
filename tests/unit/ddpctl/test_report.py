"""The report: its axes, plots and tables from values, and that nothing in it is fetched, run or taken for HTML."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from tests.unit.ddpctl.test_watch_timeline import START, timeline

from ddpctl.report.html import configuration_table, render_page
from ddpctl.run_status import RunStatus
from ddpctl.spec import JobSpec
from ddpctl.watch.history import History
from ddpctl.watch.timeline import Span
from ddpwire.events import Event

HOSTILE = "</pre><script>alert(1)</script>&"
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
    rows = re.findall(r'<tr><th>(.*?)</th><td class="mono">(.*?)</td></tr>', configuration_table(run, ["plain-secret"]))
    assert rows == [
        ("program", "t.py --password &#x27;[REDACTED]&#x27; &#x27;[REDACTED]&#x27;"),
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
    failed = RunStatus(run="night", state="failed", message=f"rank 0 said {HOSTILE}", code=1)
    event = Event(event="failed", time=150, node=0, facts={"message": HOSTILE})
    report = replace(
        timeline([*START, event], SPANS, failed),
        history=history(),
        last_lines=f"Traceback\n{HOSTILE}\n",
        last_lines_of="rank 0 on node 0",
        environments={0: {"host": HOSTILE}},
    )
    check = {"check": "doctor", "lines": ["node 0  node 1", f"{HOSTILE} s3cret-value"], "time": 140}
    text = render_page(report, checks=[check], values=["s3cret-value"])
    assert re.search(r"<h2>ddpctl doctor of [^<]*</h2>\n<pre>node 0  node 1\n", text)
    assert "s3cret-value" not in text
    parser = Tags()
    parser.feed(text)
    assert "script" not in parser.tags
    assert not parser.links, "nothing is fetched"
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert "rank 0 on node 0" in re.findall("<h2>(.*?)</h2>", text)[0]
    assert re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', text) == [
        ("100 s", "from launch to end"),
        ("49", "steps"),
        ("0.4000", "loss"),
        ("17.42", "samples per second, training"),
        ("90 %", "goodput"),
        ("0", "restarts"),
    ]


class Tags(HTMLParser):
    """Which tags there are, and what of them would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "data", "xlink:href")]
