"""A run whose files are torn, or hold what no reader can: every verb that looks back says so."""

import json
import re
from pathlib import Path

from tests.in_process import ddpctl
from tests.unit.ddpctl.test_run_store import make

EVENTS = (
    '{"time": 1790000001, "event": "node_started", "node": 0}',
    "[" * 200_000,
    '{"time": Infinity, "event": "signal", "node": 0}',
    '{"time": 1790000050, "event": "straggler", "node": 0, "rank": 0, "ratio": "x"}',
    '{"time": 1790000101, "event": "node_ended", "node": 0}',
)


def test_the_timeline_and_the_report_say_why_a_run_failed(tmp_path: Path) -> None:
    node = Path(make(tmp_path / "runs", "night", 1_790_000_000.0).folder) / "node-0"
    node.mkdir()
    (node / "events.jsonl").write_text("\n".join(EVENTS) + "\n")
    outcome = {"code": 1, "cause": "error", "message": "OSError: No space left on device", "node": 0, "rank": 0}
    (node / "outcome.json").write_text(json.dumps(outcome))
    line = (
        "why: OSError: No space left on device; a disk is full, or a limit such as that of inotify watches is reached"
    )
    assert line in ddpctl("timeline", "night").stdout.splitlines()
    assert ddpctl("report", "night", cwd=tmp_path).returncode == 0
    assert line in (tmp_path / "night.html").read_text()
    assert ddpctl("explain", "night").stdout.splitlines()[-1] == "  what to do: docs/explain.md, cause disk_full"


def test_what_cannot_be_read_is_passed_over_and_counted(tmp_path: Path) -> None:
    torn(tmp_path / "runs")
    drawn = ddpctl("timeline", "night")
    assert drawn.returncode == 0
    assert [re.findall(r"\d+ unreadable|\S+$", line) for line in drawn.stderr.splitlines()] == [
        ["2 unreadable", "events.jsonl"],
        ["1 unreadable", "history.csv"],
    ]
    first, *_, last = drawn.stdout.splitlines()
    assert ("exit code 1" in first, "101 s" in first, "rank 0 on node 0" in last) == (True, True, True)
    document = json.loads(ddpctl("timeline", "night", "--json").stdout)
    assert document["seconds"] == {"start": 1.0, "preflight": 100.0}
    written = ddpctl("report", "night", cwd=tmp_path)
    assert (written.returncode, written.stderr) == (0, drawn.stderr)
    assert "<pre>token: abc def</pre>" in (tmp_path / "night.html").read_text()
    assert ddpctl("top", "night").stdout == "night  failed: \\x1b[2Jrank 0 said\n"


def torn(root: Path) -> None:
    node = Path(make(root, "night", 1_790_000_000.0).folder) / "node-0"
    node.mkdir()
    (node / "events.jsonl").write_text("\n".join(EVENTS) + "\n")
    (node / "history.csv").write_text("time,ddp_loss\n1790000001,0.5\n2," + "9" * 200_000 + "x\n1790000003,0.4\n")
    outcome = {"code": 1, "cause": "error", "message": "\x1b[2Jrank 0 said", "node": 0, "rank": 0}
    (node / "outcome.json").write_text(json.dumps(outcome))
    (node / "rank-0.log").write_text("\x1b[31mtoken: abc def\x1b[0m\n")
