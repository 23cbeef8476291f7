"""A node's history: how samples become a row, and how a file is read that another version, or a crash, left."""

from ddpwire.history import COLUMNS, HEADER, fold, line, read_history


def test_counters_are_summed_and_of_gauges_the_largest_is_kept() -> None:
    samples = [
        ("ddp_samples_total", {"rank": "0"}, 10.0),
        ("ddp_samples_total", {"rank": "1"}, 20.0),
        ("ddp_last_step", {"rank": "0"}, 5.0),
        ("ddp_last_step", {"rank": "1"}, 4.0),
        ("ddp_step_phase_seconds_total", {"rank": "0", "phase": "data"}, 1.0),
        ("ddp_step_phase_seconds_total", {"rank": "1", "phase": "data"}, 2.0),
        ("a_script_s_own", {"rank": "0"}, 1.0),
    ]
    row = fold(samples)
    assert row == {"ddp_last_step": 5.0, "ddp_samples_total": 30.0, "ddp_step_phase_seconds_total:data": 3.0}
    (again,) = read_history(f"{HEADER}\n{line(1000.04, row)}\n")
    assert again == {"time": 1000.0, **row}


def test_every_column_is_a_series_of_the_catalogue_once() -> None:
    names = HEADER.split(",")
    assert len(names) == len(set(names)) == len(COLUMNS) + 1
    assert names[0] == "time"


def test_torn_lines_and_other_columns() -> None:
    text = "time,ddp_loss,ddp_of_tomorrow\n1,0.5,7\n2,,\n3,0.\n4,abc,1\n,0.5,1\n5"
    assert read_history(text) == (
        {"time": 1.0, "ddp_loss": 0.5, "ddp_of_tomorrow": 7.0},
        {"time": 2.0},
        {"time": 3.0, "ddp_loss": 0.0},
        {"time": 5.0},
    )
    assert read_history("") == ()
