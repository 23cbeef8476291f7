"""What ``ddpctl top`` makes of what nodes export, and how it looks: whole screens."""

import json
from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_top import FAST, TRAINING, node, screen_lines, snapshot

from ddpctl.commands.top_screen import duration, line, meter, shares, sparkline
from ddpctl.commands.watch import document
from ddpctl.execution.node_probe import ProbeResult
from ddpctl.runs.run_status import RunStatus
from ddpctl.text import number
from ddpctl.watch.history import History
from ddpctl.watch.snapshot import (
    Reading,
    empty_snapshot,
    numbers,
    read_metrics,
    rows,
    state,
    time_left_s,
)

STATES = ("rendezvous", "starting", "training", "restarting", "stopping", "succeeded", "failed")


def test_a_slow_steps_pace_is_told_by_its_steps() -> None:
    """Of steps of 8 s, readings 10 s apart see now one and now two."""

    def at(time: float) -> Reading:
        steps = int((time - 1000) // 8)
        text = (
            f'ddp_samples_total{{rank="0"}} {32 * steps}\nddp_last_step{{rank="0"}} {steps}\n'
            f'ddp_last_step_timestamp_seconds{{rank="0"}} {1000 + 8 * steps}\n'
        )
        reading = read_metrics(ProbeResult(node=0, time=time, metrics=text))
        assert reading is not None
        return reading

    paces = [numbers((at(time + 10),), (at(time),))["samples_per_s"] for time in range(1010, 1100, 3)]
    assert paces == [pytest.approx(4.0)] * len(paces)
    stalled = at(1098)
    later = replace(stalled, time=1298)
    assert numbers((later,), (at(1090),))["samples_per_s"] == pytest.approx(32 / 202)


def test_a_wait_in_the_queue_says_nothing_of_the_pace() -> None:
    def row(time: float, step: float, waited: float) -> dict[str, float]:
        counted = {"ddp_unproductive_seconds_total:requeue": waited, "ddp_ranks_alive": 2.0}
        return {"time": time, "ddp_last_step": step, **counted}

    view = replace(empty_snapshot(TRAINING, 1300.0), step=30, planned=130)
    plain = History(nodes={0: (row(1000, 0, 0), row(1300, 30, 0))})
    assert time_left_s(plain, view) == 1000
    requeued = History(nodes={0: (row(1000, 0, 0), row(1100, 10, 0), row(1300, 30, 2 * 150.0)), 1: ()})
    assert time_left_s(requeued, view) == 500


def test_a_narrow_terminal_shows_less_of_the_screen() -> None:
    assert screen_lines(snapshot(), 60, plain=True) == [
        "night  training  2 nodes x 2 ranks of ddptrain on local",
        "step       150 of 1,000  #....... 15 %  3 min left  epoch 2",
        "throughput 640 samples/s          _*#",
        "loss       0.5000  test 97.5 %     #_",
        "goodput    60 %   4 of 4 ranks   1 restart, 7 steps lost",
        "           checkpoint 25 s old (step 90)",
        "",
        "RANK  NODE  STEP  STEP TIME  WHERE IT GOES",
        "   0     0   150     200 ms  ffbwwwwwwwww",
        "   1     0   150     200 ms  ffbwwwwwwwww",
        "   2     1   150     200 ms  ffbwwwwwwwww",
        "   3     1   150     200 ms  ffbwwwwwwwww",
        "d data  h to the device  f forward  b backward",
        "w waiting for others  o optimizer  . other",
    ]
    narrow = screen_lines(snapshot(), 36)
    assert max(map(len, narrow)) <= 36
    assert narrow[-1] == "   3   150     200 ms"


def test_where_there_is_no_room_the_slowest_ranks_are_shown() -> None:
    rows = screen_lines(snapshot(slow_s=0.15), 100, height=10)
    assert [row[:10] for row in rows[6:]] == ["RANK  NODE", "   3     1", "and 3 more", "d data  h "]


def test_gpus_have_columns_where_it_is_known_whose_they_are() -> None:
    gpus = "".join(
        f'ddp_device_utilization_ratio{{device="{index}"}} 0.9{index}\n'
        f'ddp_device_memory_bytes{{kind="allocated",rank="{index}"}} {(index + 1) * 2**30}\n'
        f'ddp_device_memory_used_bytes{{device="{index}"}} 1\n'
        for index in range(2)
    )
    view = replace(empty_snapshot(TRAINING, 1030), **numbers((node(0, 150, own_s=FAST, more=gpus),), ()))  # type: ignore[arg-type]
    table = screen_lines(view, 100)[-4:-1]
    assert table[0].split() == ["RANK", "NODE", "STEP", "STEP", "TIME", "WHERE", "IT", "GOES", "OWN", "MEMORY"]
    assert [row.split()[-4:] for row in table[1:]] == [["50.0", "ms", "1.0", "GiB"], ["50.0", "ms", "2.0", "GiB"]]

    alone = 'ddp_last_step{rank="0"} 9\n' + "".join(line for line in gpus.splitlines(keepends=True) if '"0"' in line)
    reading = read_metrics(ProbeResult(node=0, time=1030, metrics=alone))
    assert reading is not None
    (row,) = rows((reading,), {})
    assert (row.device_share, row.memory_bytes) == (0.9, 2**30)


def test_a_script_that_reports_only_steps_has_a_step_time() -> None:
    def steps(number: int, time: float) -> Reading:
        reading = read_metrics(ProbeResult(node=0, time=time, metrics=f'ddp_steps_total{{rank="0"}} {number}\n'))
        assert reading is not None
        return reading

    (row,) = numbers((steps(30, 1010),), (steps(10, 1000),))["ranks"]  # type: ignore[misc]
    assert (row.step, row.step_s, row.own_s, row.phases) == (None, 0.5, None, {})


def of_script(steps: int, *more: str) -> Reading:
    """Two ranks of a script that calls progress(step)."""
    ranks = [f'ddp_steps_total{{rank="{rank}"}} {steps}\nddp_samples_total{{rank="{rank}"}} 0\n' for rank in (0, 1)]
    ranks += [f'ddp_last_step{{rank="{rank}"}} {steps}\n' for rank in (0, 1)]
    own = "ddp_ranks_alive 2\nddp_world_size 2\n"
    reading = read_metrics(ProbeResult(node=0, time=1000 + steps, metrics="".join([own, *ranks, *more])))
    assert reading is not None
    return reading


def test_of_a_script_only_what_it_reports_is_shown() -> None:
    view = replace(empty_snapshot(TRAINING, 1030), **numbers((of_script(30),), (of_script(10),)))  # type: ignore[arg-type]
    assert (view.goodput, view.samples_per_s, view.checkpoint_step) == (None, None, None)
    assert screen_lines(view, 100)[1:] == [
        "step       30",
        "running    2 of 2 ranks   no restart",
        "",
        "RANK  NODE  STEP  STEP TIME",
        "   0     0    30     1.00 s",
        "   1     0    30     1.00 s",
    ]


def test_a_checkpoint_that_a_script_saved_and_none_of_which_it_is_known() -> None:
    saved = 'ddp_checkpoint_last_success_timestamp_seconds{rank="0"} {}\nddp_checkpoint_last_step{rank="0"} {}\n'
    for time_s, step, text in ((0, 0, "no checkpoint yet"), (1020, 20, "checkpoint 10 s old (step 20)")):
        reported = saved.replace("{}", str(time_s), 1).replace("{}", str(step), 1)
        now = numbers((of_script(30, reported),), ())
        assert now["checkpoint_step"] == step
        assert text in screen_lines(replace(empty_snapshot(TRAINING, 1030), **now), 100)[2]  # type: ignore[arg-type]


def test_a_counter_that_was_begun_anew_counts_from_nothing() -> None:
    before, now = node(0, 150, own_s=FAST), node(0, 50, own_s=FAST, time=1060)
    assert numbers((now,), (before,))["samples_per_s"] == pytest.approx(2 * 50 * 32 / 30)


def test_sparklines_shares_and_meters_fit_their_width() -> None:
    assert sparkline((0, 1, None, 7), 10) == "▁▂ █"
    assert sparkline((5, 5), 10, plain=True) == "__"
    assert sparkline((None,), 10) == ""
    assert sparkline(range(100), 4) == "▁▃▆█"
    assert shares({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert shares({"a": 0}, 10) == {}
    assert meter(0.5, 4) == "██░░"
    assert meter(7, 4, plain=True) == "####"


def test_numbers_and_durations_are_rounded() -> None:
    assert [number(value) for value in (0.3512, 12345.0, 1e-5, float("nan"))] == [
        "0.3512",
        "1.234e+04",
        "1.000e-05",
        "nan",
    ]
    assert [duration(value) for value in (0.0123, 0.25, 3.14159)] == ["12.3 ms", "250 ms", "3.14 s"]


def test_a_run_is_as_far_as_its_slowest_node_says() -> None:
    def says(*arguments: str) -> Reading:
        text = "".join(f'ddp_job_state{{state="{word}"}} {int(word in arguments)}\n' for word in STATES)
        reading = read_metrics(ProbeResult(node=0, time=1.0, metrics=text))
        assert reading is not None
        return reading

    assert state((says("training"), says("training"))) == "training"
    assert state((says("training"), says("restarting"))) == "rendezvous"
    assert state((says("training"), says("starting"))) == "starting"
    assert state((says("stopping"), says("training"))) == "stopping"
    assert state((says("succeeded"),)) is None
    assert state(()) is None


def test_a_rank_that_takes_no_step_is_marked() -> None:
    now = (node(0, 150, own_s=FAST, time=1075), node(1, 150, own_s=FAST, time=1075))
    view = replace(empty_snapshot(TRAINING, 1075), **numbers(now, now))  # type: ignore[arg-type]
    assert [row.silent_s for row in view.ranks] == [45.0] * 4
    assert "45 s" in screen_lines(view, 100)[-2]


def test_a_run_without_metrics_shows_its_state_alone() -> None:
    waits = empty_snapshot(replace(TRAINING, state="pending", message="job 7 is waiting (Priority)"), 1000)
    assert screen_lines(waits, 80) == [
        "night  pending  2 nodes x 2 ranks of ddptrain on local",
        "job 7 is waiting (Priority)",
    ]
    assert line(waits) == "night  pending: job 7 is waiting (Priority)"
    ended = replace(TRAINING, state="failed", message="rank 1 on node 0 was killed (SIGKILL)", code=137)
    view = replace(empty_snapshot(ended, 1000), step=450, loss=0.25, losses=(1.0, 0.25))
    assert screen_lines(view, 80) == [
        "night  failed, exit code 137  2 nodes x 2 ranks of ddptrain on local",
        "rank 1 on node 0 was killed (SIGKILL)",
        "step       450",
        "loss       0.2500                █▁",
    ]


def test_metrics_that_cannot_be_read_are_no_reading() -> None:
    assert read_metrics(ProbeResult(node=0, time=1.0, metrics="ddp_loss{")) is None
    assert read_metrics(ProbeResult(node=0, failure="no route")) is None


def test_the_document_is_one_line_of_json_whose_course_has_its_times() -> None:
    ranks = snapshot().ranks
    view = replace(
        snapshot(),
        ranks=(replace(ranks[0], step_s=float("nan")), *ranks[1:]),
        loss=float("nan"),
        moments=(1.0, 2.0, 3.0),
        throughput=(None, 10.0, float("inf")),
        losses=(float("nan"), None, 0.5),
    )
    text = document(view)
    assert "\n" not in text
    values = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (values["run"], values["loss"], values["ranks"][0]["step_s"]) == ("night", None, None)
    assert values["throughput"] == [{"time": 2.0, "value": 10.0}]
    assert values["losses"] == [{"time": 3.0, "value": 0.5}]
    assert "moments" not in values


def test_what_a_run_says_moves_no_cursor() -> None:
    view = empty_snapshot(RunStatus(run="night", state="lost", message="\x1b[2Jgone"), 0)
    assert screen_lines(view, 80)[1] == "\\x1b[2Jgone"
    assert line(view) == "night  lost: \\x1b[2Jgone"
