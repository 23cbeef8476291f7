"""The curve that a cell shows, from the history of its run's node."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.ddpctl.test_notebook_progress import row, write

from ddpctl.notebook.progress import MAX_POINTS, Lines, Progress, curve, points_of

SVG = "{http://www.w3.org/2000/svg}"


def ends(picture: str) -> tuple[str, ...]:
    """The first and the last point of the curve."""
    (path,) = re.findall(r'<polyline points="([^"]+)"', picture)
    return path.split()[0], path.split()[-1]


def test_elsewhere_the_last_line_is_the_runs_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, row(90, loss=1.0))
    Progress(tmp_path, Lines()).update(last=True)
    assert capsys.readouterr().out == "step 90   loss 1.0000\n"


def test_the_axes_span_the_planned_steps_and_the_losses() -> None:
    picture = curve(points_of([row(10, loss=2.0, planned=100), row(50, loss=0.5, planned=100)]))
    root = ElementTree.fromstring(picture)  # noqa: S314 -- our own text
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts == ["0.5", "1", "1.5", "2", "0", "20", "40", "60", "80", "100", "loss", "step"]
    (x, _), (end, _) = (point.split(",") for point in ends(picture))
    assert (float(x), float(end)) == (64 + 0.1 * 480, 64 + 0.5 * 480)  # of the axis from 64 to 544


def test_a_resumed_trainings_axis_begins_at_its_first_step() -> None:
    picture = curve(points_of([row(900, loss=2.0), row(1000, loss=0.5)]))
    assert [point.split(",")[0] for point in ends(picture)] == ["64.0", "544.0"]


def test_steps_that_a_later_attempt_takes_again_are_left_out() -> None:
    points = points_of([row(10, loss=4.0), row(20, loss=3.0), row(30, loss=2.0), row(20, loss=2.5), row(40, loss=1.0)])
    assert [(point.step, point.loss) for point in points] == [(10, 4.0), (20, 2.5), (40, 1.0)]


def test_no_loss_and_nan_and_one_point_and_many() -> None:
    nan = float("nan")
    assert curve(points_of([row(10)])) == ""
    assert curve(points_of([row(10, loss=nan)])) == ""
    assert "nan" not in curve(points_of([row(10, loss=1.0), row(20, loss=nan), row(30, loss=0.5)]))
    assert len(set(ends(curve(points_of([row(10, loss=1.0)]))))) == 1
    many = curve(points_of([row(step, loss=1 / step) for step in range(1, 5000)]))
    (path,) = re.findall(r'<polyline points="([^"]+)"', many)
    assert len(path.split()) <= MAX_POINTS + 1
    assert path.split()[-1].startswith("544.0,")


def test_a_loss_that_holds_for_an_epoch_is_drawn_once_and_to_the_present_step() -> None:
    picture = curve(points_of([row(step, loss=2.0 if step < 50 else 1.0) for step in range(1, 100)]))
    (path,) = re.findall(r'<polyline points="([^"]+)"', picture)
    assert len(path.split()) == 3
