"""What ``ddpctl top`` makes of what nodes export, and how it looks: whole screens."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.test_local import RUN

from ddpctl.command import Output
from ddpctl.commands.top_screen import line, screen
from ddpctl.errors import UnavailableError
from ddpctl.execution.node_probe import ProbeResult
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import RunStatus
from ddpctl.watch.history import History
from ddpctl.watch.snapshot import (
    Reading,
    Snapshot,
    Watcher,
    empty_snapshot,
    numbers,
    read_metrics,
    time_left_s,
)
from ddpwire.metrics import STEP_PHASES

TRAINING = RunStatus(run="night", state="training", message="2 of 2 nodes alive")


def rank_metrics(rank: int, *, steps: int, own_s: float, step_s: float = 0.2) -> str:
    """What a rank exports after so many steps, each with this much of its own time, of which half is forward."""
    phases = dict.fromkeys(STEP_PHASES, 0.0) | {
        "data": 0.1 * own_s,
        "forward": 0.5 * own_s,
        "backward": 0.4 * own_s,
        "comm_exposed": step_s - own_s,
    }
    lines = [
        f'ddp_step_phase_seconds_total{{phase="{name}",rank="{rank}"}} {each * steps}' for name, each in phases.items()
    ]
    return "\n".join(
        [
            *lines,
            f'ddp_step_duration_seconds_sum{{rank="{rank}"}} {steps * step_s}',
            f'ddp_step_duration_seconds_count{{rank="{rank}"}} {steps}',
            f'ddp_steps_total{{rank="{rank}"}} {steps}',
            f'ddp_samples_total{{rank="{rank}"}} {32 * steps}',
            f'ddp_last_step{{rank="{rank}"}} {steps}',
            f'ddp_last_step_timestamp_seconds{{rank="{rank}"}} {1000 + steps * step_s}',
            f'ddp_productive_seconds_total{{rank="{rank}"}} {steps * step_s}',
            f'ddp_unproductive_seconds_total{{cause="startup",rank="{rank}"}} 20',
        ]
    )


def node(number: int, steps: int, *, own_s: tuple[float, float], time: float | None = None, more: str = "") -> Reading:
    ranks = "\n".join(rank_metrics(2 * number + local, steps=steps, own_s=own_s[local]) for local in range(2))
    of_node = 'ddp_ranks_alive 2\nddp_world_size 4\nddp_restarts_total{reason="killed"} 1\nddp_steps_lost_total 7\n'
    at = 1000 + steps * 0.2 if time is None else time
    reading = read_metrics(ProbeResult(node=number, time=at, metrics=f"{of_node}{more}\n{ranks}\n"))
    assert reading is not None
    return reading


OF_RANK_0 = """\
ddp_loss{rank="0"} 0.5
ddp_eval_accuracy_ratio{rank="0",split="test"} 0.975
ddp_planned_steps{rank="0"} 1000
ddp_epoch{rank="0"} 2
ddp_checkpoint_last_success_timestamp_seconds{rank="0"} 1005
ddp_checkpoint_last_step{rank="0"} 90"""
FAST = (0.05, 0.05)


def snapshot(slow_s: float = 0.05) -> Snapshot:
    before = (node(0, 100, own_s=FAST), node(1, 100, own_s=FAST))
    # Until step 100 all were alike: what the last 50 steps were like is what counts.
    grown = 100 * 0.05 + 50 * slow_s
    now = (node(0, 150, own_s=FAST, more=OF_RANK_0), node(1, 150, own_s=(0.05, grown / 150)))
    history = {"throughput": (None, 500.0, 600.0, 640.0), "losses": (None, None, 1.5, 0.5), "left_s": 170.0}
    return replace(empty_snapshot(TRAINING, 1030), **numbers(now, before), **history)  # type: ignore[arg-type]


def screen_lines(view: Snapshot, width: int, *, height: int | None = None, plain: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(screen(view, title="2 nodes x 2 ranks of ddptrain on local", width=width, height=height, plain=plain))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [row.rstrip() for row in text.splitlines()]


def test_top_shows_steps_throughput_loss_goodput_and_ranks() -> None:
    assert screen_lines(snapshot(), 100) == [
        "night  training  2 nodes x 2 ranks of ddptrain on local",
        "step       150 of 1,000  ███░░░░░░░░░░░░░░░░░ 15 %  3 min left  epoch 2",
        "throughput 640 samples/s          ▁▆█",
        "loss       0.5000  test 97.5 %     █▁",
        "goodput    60 %   4 of 4 ranks   1 restart, 7 steps lost   checkpoint 25 s old (step 90)",
        "",
        "RANK  NODE  STEP  STEP TIME  WHERE IT GOES                           OWN",
        "   0     0   150     200 ms  dffffbbbwwwwwwwwwwwwwwwwwwwwwwwwww  50.0 ms",
        "   1     0   150     200 ms  dffffbbbwwwwwwwwwwwwwwwwwwwwwwwwww  50.0 ms",
        "   2     1   150     200 ms  dffffbbbwwwwwwwwwwwwwwwwwwwwwwwwww  50.0 ms",
        "   3     1   150     200 ms  dffffbbbwwwwwwwwwwwwwwwwwwwwwwwwww  50.0 ms",
        "d data  h to the device  f forward  b backward  w waiting for others  o optimizer  . other",
    ]


def test_a_straggler_is_marked_by_its_own_time() -> None:
    view = snapshot(slow_s=0.15)
    assert [row.slow and round(row.slow, 2) for row in view.ranks] == [None, None, None, 3.0]
    assert screen_lines(view, 100)[10].split()[-4:] == ["3.0", "x", "the", "others"]
    assert ("rank 3 on node 1" in line(view), "3.0 x" in line(view)) == (True, True)


def test_a_low_screen_has_the_slowest_ranks() -> None:
    assert [row.split()[0] for row in screen_lines(snapshot(slow_s=0.15), 100, height=10)[7:9]] == ["3", "and"]


def test_a_wait_in_a_queue_is_no_pace() -> None:
    rows = (
        {"time": 1000.0, "ddp_last_step": 0.0},
        {
            "time": 1100.0,
            "ddp_last_step": 10.0,
            "ddp_ranks_alive": 2.0,
            "ddp_unproductive_seconds_total:requeue": 120.0,
        },
    )
    now = replace(empty_snapshot(TRAINING, 1100), step=10, planned=30)
    assert time_left_s(History(nodes={0: rows}), now) == 20 * (100 - 60) / 10


class Flaky:
    """An executor whose target gives these answers, and then no more."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def perform(self, verb: Any, on_interrupt: Any = None) -> Any:  # noqa: ARG002
        if not self.answers:
            raise UnavailableError("cannot ask the nodes: no answer within 45 s")
        return perform(verb, {"": Output(returncode=0, stdout=self.answers.pop(0))})[1]


STATUS = '{"dir": "", "alive": true, "node": null, "outcome": null}\n'
PROBE = f"\x1e=0\n\n\x1e=time\n1000.0\n\n\x1e=metrics\n{rank_metrics(0, steps=5, own_s=0.1)}\n"
PROBE += 'ddp_job_state{state="restarting"} 1\n'


def test_a_watcher_goes_on_where_nobody_answers_for_a_while(tmp_path: Path) -> None:
    run = replace(RUN, job=replace(RUN.job, nodes="1", gpus=1))
    later = PROBE.replace('steps_total{rank="0"} 5', 'steps_total{rank="0"} 6').replace(
        'step{rank="0"} 5', 'step{rank="0"} 6'
    )
    executor: Any = Flaky(STATUS, later, PROBE)
    context = AppContext(executor=executor, root=tmp_path, emit=print)
    watcher = Watcher(context, run)
    assert [row.step for row in watcher.probe().ranks] == [6]
    first = watcher.probe()
    assert [row.step for row in first.ranks] == [5], "the target is not asked again for the status"
    assert first.state == "rendezvous", "what its node says is newer than the status of the run"
    again = watcher.probe()
    assert again == replace(first, silent=again.silent)
    (silent,) = again.silent
    assert "no answer within 45 s" in silent
    with pytest.raises(UnavailableError):
        Watcher(replace(context, executor=executor), run).probe()
