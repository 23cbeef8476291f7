"""The curve that a cell shows, from the history of its run's node."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.ddpctl.test_notebook_session import row, write

from ddpctl.notebook.progress import MAX_POINTS, Progress, curve, last_attempts
from ddpwire.history import Row


def points(rows: Sequence[Row]) -> list[str]:
    """The points of the curve."""
    picture = curve(rows)
    assert picture is not None
    return list(picture["points"])


def test_elsewhere_the_last_line_is_the_runs_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, row(90, loss=1.0))
    Progress(tmp_path, None).update(last=True)
    assert capsys.readouterr().out == "step 90   loss 1.0000\n"


def test_the_axes_span_the_planned_steps_and_the_losses() -> None:
    rows = [row(10, loss=2.0, planned=100), row(50, loss=0.5, planned=100)]
    picture = curve(rows)
    assert picture is not None
    assert [label for _, label in picture["losses"]] == ["0.5", "1", "1.5", "2"]
    assert [label for _, label in picture["steps"]] == ["0", "20", "40", "60", "80", "100"]
    begin, end = (float(points(rows)[place].partition(",")[0]) for place in (0, -1))
    assert (begin, end) == (64 + 0.1 * 480, 64 + 0.5 * 480)  # of the axis from 64 to 544


def test_a_resumed_trainings_axis_begins_at_its_first_step() -> None:
    assert [point.partition(",")[0] for point in points([row(900, loss=2.0), row(1000, loss=0.5)])] == [
        "64.0",
        "544.0",
        "544.0",
    ]


def test_steps_that_a_later_attempt_takes_again_are_left_out() -> None:
    rows = [row(10, loss=4.0), row(20, loss=3.0), row(30, loss=2.0), row(20, loss=2.5), row(40, loss=1.0)]
    assert last_attempts(rows) == [rows[0], rows[3], rows[4]]


def test_no_loss_and_nan_and_one_point_and_many() -> None:
    nan = float("nan")
    assert curve([row(10)]) is None
    assert curve([row(10, loss=nan)]) is None
    assert "nan" not in str(curve([row(10, loss=1.0), row(20, loss=nan), row(30, loss=0.5)]))
    assert len(set(points([row(10, loss=1.0)]))) == 1
    many = points([row(step, loss=1 / step) for step in range(1, 5000)])
    assert len(many) <= MAX_POINTS + 1
    assert many[-1].startswith("544.0,")


def test_a_loss_that_holds_for_an_epoch_is_drawn_once_and_to_the_present_step() -> None:
    assert len(points([row(step, loss=2.0 if step < 50 else 1.0) for step in range(1, 100)])) == 3
