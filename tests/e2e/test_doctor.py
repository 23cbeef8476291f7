"""``ddpctl doctor`` on this machine, which is sound however busy it is, and ``launch --doctor``."""

import json
from pathlib import Path

from tests.e2e.driver import SCRIPTS, ddpctl


def test_a_sound_machine_under_load_is_not_bad(tmp_path: Path) -> None:
    done = ddpctl("doctor", "--nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["node"] for one in found["nodes"]] == [0, 1]
    assert {one["status"] for one in found["results"]} <= {"ok", "warning", "not looked at"}
    assert {"libraries", "disk", "clock", "CPU", "open files"} <= {one["check"] for one in found["results"]}
    assert all(one["value"] and one["expected"] and one["todo"] for one in found["results"])
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name[0] != "."] == []


def test_a_launch_begins_when_the_doctor_has_found_nothing_and_its_report_shows_that(tmp_path: Path) -> None:
    done = ddpctl("launch", "--doctor", "--", str(SCRIPTS / "ends.py"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("open files") < done.stderr.index("run ")
    assert ddpctl("report", "-o", str(tmp_path / "page.html")).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "open files" in page[page.index("<h2>ddpctl doctor of local, ") :]
