"""A run whose files are torn, or hold what no reader can: every verb that looks back says so."""

import json
from pathlib import Path

from tests.in_process import ddpctl
from tests.unit.ddpctl.test_run_store import EVENTS, make


def test_the_timeline_and_the_report_say_why_a_run_failed(tmp_path: Path) -> None:
    node = Path(make(tmp_path / "runs", "night", 1_790_000_000.0).folder) / "node-0"
    node.mkdir()
    (node / "events.jsonl").write_text("\n".join(EVENTS) + "\n")
    outcome = {"code": 1, "cause": "error", "message": "OSError: No space left on device", "node": 0, "rank": 0}
    (node / "outcome.json").write_text(json.dumps(outcome))
    why = "why: OSError: No space left on device; a disk is full, or a limit such as that of inotify watches is reached"
    assert why in ddpctl("timeline", "night").stdout.splitlines()
    assert ddpctl("report", "night", cwd=tmp_path).returncode == 0
    assert why in (tmp_path / "night.html").read_text()
    assert ddpctl("explain", "night").stdout.splitlines()[-1] == "  what to do: docs/explain.md, cause disk_full"
