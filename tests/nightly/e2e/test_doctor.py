"""``ddpctl launch --doctor`` on this machine, which is sound however busy it is."""

from pathlib import Path

from tests.e2e.driver import SCRIPTS, ddpctl


def test_launch_doctor_starts_a_sound_job_and_its_report_has_the_checks(tmp_path: Path) -> None:
    done = ddpctl("launch", "--doctor", "--", str(SCRIPTS / "ends.py"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("open files") < done.stderr.index("run ")
    assert ddpctl("report", "-o", str(tmp_path / "page.html")).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "open files" in page[page.index("<h2>ddpctl doctor of local, ") :]
