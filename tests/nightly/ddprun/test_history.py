"""A node's history: how samples become a row, and how a file is read that another version, or a crash, left."""

from ddpwire.history import read_history, strange_rows


def test_cells_that_no_reader_can_hold_and_times_that_are_none() -> None:
    rows = ("1,0.5", "2," + "9" * 200_000 + "x", "NaN,1", "Infinity,1", "-5,1", "1e300,1", "3,NaN", 'x"y,1')
    text = "\n".join(("time,ddp_loss", *rows)) + "\n4,0."
    rows_read = read_history(text)
    assert [row["time"] for row in rows_read] == [1.0, 3.0, 4.0]
    assert (strange_rows(text), strange_rows("")) == (6, 0)
