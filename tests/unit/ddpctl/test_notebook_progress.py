"""The curve that a cell shows, from the history of its run's node."""

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddpctl.notebook.progress import MAX_POINTS, Lines, Point, Progress, curve, points_of, words
from ddpwire.history import HEADER, HISTORY, line, read_history

SVG = "{http://www.w3.org/2000/svg}"


def row(step: int, **values: float) -> dict[str, float]:
    names = {"loss": "ddp_loss", "planned": "ddp_planned_steps", "samples": "ddp_samples_total"}
    return {"time": 1000.0 + step, "ddp_last_step": step, **{names[name]: value for name, value in values.items()}}


def write(folder: Path, *rows: dict[str, float]) -> None:
    (folder / HISTORY).write_text("\n".join([HEADER, *(line(one["time"], one) for one in rows), ""]))


def ends(picture: str) -> tuple[str, ...]:
    """The first and the last point of the curve."""
    (path,) = re.findall(r'<polyline points="([^"]+)"', picture)
    return path.split()[0], path.split()[-1]


class Shown:
    """What was shown, in the place of a cell."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def show(self, points: Sequence[Point], text: str, *, last: bool) -> None:
        del text
        self.steps.append((points[-1].step, last))


def test_the_last_picture_is_the_runs_end_also_where_nothing_was_shown_before(tmp_path: Path) -> None:
    shown = Shown()
    progress = Progress(tmp_path, shown)
    progress.update()  # there is no history yet
    write(tmp_path, row(30, loss=2.0))
    progress.update()  # it is not time yet
    write(tmp_path, row(30, loss=2.0), row(90, loss=1.0))
    progress.update(last=True)
    assert shown.steps == [(90, True)]


def test_a_run_that_reports_nothing_shows_nothing(tmp_path: Path) -> None:
    shown = Shown()
    progress = Progress(tmp_path, shown)
    write(tmp_path, {"time": 1000.0})
    progress.update()
    progress.update(last=True)
    assert shown.steps == []


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


def test_the_line_says_how_far_it_is() -> None:
    rows = read_history("\n".join([HEADER, line(1000.0, row(10, samples=100)), line(1002.0, row(20, samples=300))]))
    assert words(points_of(rows)) == "step 20   100 samples/s"
    assert words(points_of([row(20, planned=90, loss=0.5)])) == "step 20 of 90   loss 0.5000"
