"""A life for each alert, minute by minute: healthy, ill, healthy again; and what is said while it is ill. And half a
day of scripts that tell ddprun little or nothing, in which none fires.

Values are promtool's: ``2x5`` is six times 2, ``0+60x9`` ten values from 0 on. Time begins at 0.
"""

from dataclasses import dataclass, field

from ddpwire.metrics import LAST_STEP, LAST_STEP_TIME, OF_A_NODE, SAMPLES, STEP_DURATION, STEPS

HALF_A_DAY = 720  # minutes
NODES = {"0": "10.0.0.1:9200", "1": "10.0.0.2:9200"}
RUN = {"job": "ddp", "job_id": "night"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``silent``, ``firing``, ``resolved``: minutes. ``labels`` and ``summary`` are those while it fires."""

    alert: str
    what: str
    series: tuple[tuple[str, str], ...]
    silent: tuple[int, ...]  # healthy, or ill for too short
    firing: int
    resolved: int | None  # None: the life is about something else
    summary: str
    labels: dict[str, str] = field(default_factory=dict)


def s(name: str, values: str, node: str = "0", **labels: str) -> tuple[str, str]:
    matchers = ",".join(f'{key}="{value}"' for key, value in on(node, **labels).items())
    return f"{name}{{{matchers}}}", values


def on(node: str, **labels: str) -> dict[str, str]:
    return {**RUN, "node": node, "instance": NODES[node], **labels}


WARNINGS = {"DdpNoFirstStep", "DdpHeartbeatMissing", "DdpScrapeDown", "DdpStraggler", "DdpDataBound", "DdpLowGoodput"}
WARNINGS |= {"DdpMixedVersions", "DdpClockSkew"}  # the others are critical

TRAINING = s("ddp_job_state", "1x300", state="training")
STARTED = s("ddp_job_start_timestamp_seconds", "1x300")
FIRST_STEP = "night, started {} ago, waits for its first step, or for the first after a restart"

CASES = (
    Case(
        alert="DdpNoFirstStep",
        what="a first step of ddptrain that comes after half an hour",
        series=(
            STARTED,
            TRAINING,
            s("ddp_productive_seconds_total", "0x28 0+60x20", rank="0"),
            s("ddp_last_step_timestamp_seconds", "0x28 1740+60x20", rank="0"),
        ),
        silent=(0, 15, 16),
        firing=20,
        resolved=30,
        summary=FIRST_STEP.format("19m 59s"),
    ),
    Case(
        alert="DdpNoFirstStep",
        what="a script that told of steps for ten minutes, was started again, and loads for half an hour",
        series=(
            STARTED,
            TRAINING,
            s("ddp_steps_total", "0+9x10 90x30 90+9x20", rank="0"),
            s("ddp_last_step_timestamp_seconds", "0+60x10 stale _ 0x28 2460+60x20", rank="0"),
        ),
        silent=(0, 12, 20, 25),
        firing=28,
        resolved=42,
        summary=FIRST_STEP.format("27m 59s"),
    ),
    Case(
        alert="DdpNoFirstStep",
        what="an unchanged script whose nodes wait for each other for 20 minutes",
        series=(STARTED, s("ddp_job_state", "0x20 1x100", state="training")),
        silent=(0, 15, 16),
        firing=18,
        resolved=21,
        summary=FIRST_STEP.format("17m 59s"),
    ),
    Case(
        alert="DdpStalledStep",
        what="ten minutes without a step",
        series=(TRAINING, s("ddp_last_step_timestamp_seconds", "0+60x10 600x10 1320+60x10", rank="0")),
        silent=(5, 13, 14),
        firing=18,
        resolved=23,
        summary="night has taken no step for 8m 0s",
    ),
    Case(
        alert="DdpStalledStep",
        what="an evaluation of ten minutes, in which there are signs of life, that hangs then",
        series=(
            TRAINING,
            s("ddp_last_step_timestamp_seconds", "0+60x10 600x30", rank="0"),
            s("ddp_heartbeat_timestamp_seconds", "0+60x20 1200x20", rank="0"),
        ),
        silent=(18, 22, 23),
        firing=26,
        resolved=None,
        summary="night has taken no step for 16m 0s",
    ),
    Case(
        alert="DdpHeartbeatMissing",
        what="rank 1 silent while rank 0 works on",
        series=(
            TRAINING,
            s("ddp_heartbeat_timestamp_seconds", "0+60x40", rank="0"),
            s("ddp_heartbeat_timestamp_seconds", "0+60x10 600x10 1320+60x10", rank="1"),
        ),
        silent=(5, 13, 14),
        firing=18,
        resolved=23,
        summary="rank 1 on node 0 of night has given no sign of life for 8m 0s",
        labels=on("0", rank="1"),
    ),
    Case(
        alert="DdpRanksMissing",
        what="a node's ranks gone for ten minutes",
        series=(
            s("ddp_world_size_expected", "4x40"),
            s("ddp_ranks_alive", "2x40"),
            s("ddp_ranks_alive", "2x5 0x9 2x20", "1"),
        ),
        silent=(5, 8),
        firing=10,
        resolved=17,
        summary="night runs with 2 ranks, which are fewer than it should have",
    ),
    Case(
        alert="DdpRanksMissing",
        what="a machine that does not answer any more",
        series=(
            s("ddp_world_size_expected", "4x40"),
            s("ddp_ranks_alive", "2x40"),
            s("ddp_ranks_alive", "2x5 stale", "1"),
        ),
        silent=(5, 8),
        firing=10,
        resolved=None,
        summary="night runs with 2 ranks, which are fewer than it should have",
    ),
    Case(
        alert="DdpScrapeDown",
        what="a node that does not answer for six minutes",
        series=(s("up", "1x40"), s("up", "1x3 0x5 1x20", "1")),
        silent=(3, 5),
        firing=7,
        resolved=11,
        summary="node 1 of night does not answer at 10.0.0.2:9200",
        labels=on("1"),
    ),
    Case(
        alert="DdpStraggler",
        what="rank 3 three times slower",
        series=(
            s("ddp_straggler_skew_ratio", "1.1x3 3x10 1.1x20", rank="0"),
            s("ddp_rank_relative_speed_ratio", "1x40", rank="0"),
            s("ddp_rank_relative_speed_ratio", "0.95x3 0.33x10 0.95x20", "1", rank="3"),
        ),
        silent=(3, 8),
        firing=10,
        resolved=15,
        summary="rank 3 on node 1 slows night down: 33% of the fastest rank's speed",
        labels=on("1", rank="3"),
    ),
    Case(
        alert="DdpDataBound",
        what="data for 10 %, then for half of each step",
        series=(
            s("ddp_step_phase_seconds_total", "0+6x10 90+30x19 666+6x30", rank="0", phase="data"),
            s("ddp_step_phase_seconds_total", "0+54x10 570+30x19 1194+54x30", rank="0", phase="forward"),
        ),
        silent=(10, 20),
        firing=28,
        resolved=38,
        summary="night spends 50% of its steps waiting for data",
        labels={"phase": "data"},
    ),
    Case(
        alert="DdpLowGoodput",
        what="an hour in which two thirds of the time are lost, after one in which a tenth is",
        series=(
            STARTED,
            s("ddp_productive_seconds_total", "0+54x70 3800+20x59 5040+60x100", rank="0"),
            s("ddp_unproductive_seconds_total", "0+6x70 460+40x59 2820x100", rank="0", cause="restart"),
        ),
        silent=(50, 70, 75),
        firing=130,
        resolved=200,
        summary="night trained in 33.33% of the last hour",
    ),
    Case(
        alert="DdpLowGoodput",
        what="a slow start, which is no matter within the first hour",
        series=(
            STARTED,
            s("ddp_productive_seconds_total", "0+20x200", rank="0"),
            s("ddp_unproductive_seconds_total", "0+40x200", rank="0", cause="startup"),
        ),
        silent=(30, 60, 70),
        firing=100,
        resolved=None,
        summary="night trained in 33.33% of the last hour",
    ),
    Case(
        alert="DdpCheckpointStale",
        what="no checkpoint for 75 minutes",
        series=(TRAINING, STARTED, s("ddp_checkpoint_last_success_timestamp_seconds", "0x4 300x75 4860x20", rank="0")),
        silent=(4, 64, 66),
        firing=70,
        resolved=82,
        summary="the newest checkpoint of night is 1h 5m 0s old",
    ),
    Case(
        alert="DdpCheckpointStale",
        what="a run that has never saved",
        series=(TRAINING, STARTED, s("ddp_checkpoint_last_success_timestamp_seconds", "0x200", rank="0")),
        silent=(30, 60),
        firing=65,
        resolved=None,
        summary="the newest checkpoint of night is 1h 4m 59s old",
    ),
    Case(
        alert="DdpCheckpointFailing",
        what="one checkpoint for which the disk was full",
        series=(s("ddp_checkpoint_failures_total", "0x5 1x40", rank="0", op="save", reason="enospc"),),
        silent=(5,),
        firing=7,
        resolved=22,
        summary="night could not save a checkpoint: enospc",
        labels={"op": "save", "reason": "enospc"},
    ),
    Case(
        alert="DdpNonfinite",
        what="one loss that is no number",
        series=(s("ddp_nonfinite_total", "0x5 1x40", rank="0", where="loss"),),
        silent=(5,),
        firing=7,
        resolved=22,
        summary="the loss of night is no number any more",
        labels={"where": "loss"},
    ),
    Case(
        alert="DdpRestartStorm",
        what="three restarts in three minutes, each told by both nodes",
        series=(
            s("ddp_restarts_total", "0x5 1 2 3x100", reason="oom"),
            s("ddp_restarts_total", "0x5 1 2 3x100", "1", reason="oom"),
        ),
        silent=(5, 7),
        firing=10,
        resolved=70,
        summary="night has started again 3 times within an hour",
    ),
    Case(
        alert="DdpMixedVersions",
        what="a node with another torch, until it is started anew",
        series=(
            s("ddp_build_info", "1x40", version="0.1.0", torch_version="2.10.0"),
            s("ddp_build_info", "1x5 stale", "1", version="0.1.0", torch_version="2.11.0"),
            s("ddp_build_info", "_x5 1x20", "1", version="0.1.0", torch_version="2.10.0"),
        ),
        silent=(0,),
        firing=3,
        resolved=7,
        summary="the nodes of night run 2 different versions",
    ),
    Case(
        alert="DdpClockSkew",
        what="a clock that is behind for six minutes",
        series=(s("ddp_clock_offset_seconds", "0x40"), s("ddp_clock_offset_seconds", "0x3 -2.5x5 0x20", "1")),
        silent=(3, 4),
        firing=6,
        resolved=10,
        summary="node 1 of night has a clock that is 2.5s off",
        labels=on("1"),
    ),
)


def of_ddprun(*, restarted: bool = False) -> tuple[tuple[str, str], ...]:
    """All that two nodes of two ranks tell for half a day of a script that tells nothing: it starts within a minute.

    ``restarted``: all ranks start again in the sixth hour, which takes two minutes.
    """
    n = HALF_A_DAY
    training, alive, restarts = f"0 1x{n}", f"0 2x{n}", f"0x{n}"
    if restarted:
        training, alive, restarts = f"0 1x358 0x1 1x{n}", f"0 2x358 0x1 2x{n}", f"0x359 1x{n}"
    values = {
        ("ddp_job_start_timestamp_seconds", ()): f"1x{n}",
        ("ddp_build_info", ()): f"1x{n}",
        ("ddp_run_info", ()): f"1x{n}",
        ("ddp_job_state", ("training",)): training,
        ("ddp_world_size", ()): f"0 4x{n}",
        ("ddp_world_size_expected", ()): f"4x{n}",
        ("ddp_ranks_alive", ()): alive,
        ("ddp_restarts_total", ("killed",)): restarts,
    }
    found = []
    for metric in OF_A_NODE:
        each = [{label: value} for label, known in metric.labels.items() for value in known] or [{}]
        for node in NODES if metric.at_first else ():
            found.append(s("up", f"1x{n}", node))
            for labels in each:
                found.append(
                    s(metric.name, values.get((metric.name, tuple(labels.values())), f"0x{n}"), node, **labels)
                )
    return tuple(dict.fromkeys(found))


def of_loop(steps: str, last_step: str) -> tuple[tuple[str, str], ...]:
    """What a rank tells as soon as its script imports ddpwire.script."""
    names = (STEPS.name, SAMPLES.name, LAST_STEP.name, f"{STEP_DURATION.name}_sum", f"{STEP_DURATION.name}_count")
    told = {**dict.fromkeys(names, steps), LAST_STEP_TIME.name: last_step}
    return tuple(s(name, values, node, rank=node) for name, values in told.items() for node in NODES)


BEATS = tuple(s("ddp_heartbeat_timestamp_seconds", f"_x2 120+60x{HALF_A_DAY}", node, rank=node) for node in NODES)
IMPORTED = of_loop(f"_ 0x{HALF_A_DAY}", f"_ 0x{HALF_A_DAY}")
TOLD = of_loop(f"_ 0+9x{HALF_A_DAY}", f"_ 60+60x{HALF_A_DAY}")
SILENT_LIVES = {
    "an unchanged script": of_ddprun(),
    "an unchanged script that is started again": of_ddprun(restarted=True),
    "a script that imports ddpwire.script and tells nothing": (*of_ddprun(), *IMPORTED),
    "a script that only says that it lives": (*of_ddprun(), *IMPORTED, *BEATS),
    "a script that tells of its steps": (*of_ddprun(), *TOLD, *BEATS),
}
