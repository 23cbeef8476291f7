"""A life for each alert, minute by minute: healthy, ill, healthy again; and what is said while it is ill. And half a
day of scripts that tell ddprun little or nothing, and of healthy trainings, in which none fires.

Values are promtool's: ``2x5`` is six times 2, ``0+60x9`` ten values from 0 on. Time begins at 0.
"""

from dataclasses import dataclass, field

from ddpwire.metrics import BUILD_INFO, LAST_STEP, LAST_STEP_TIME, OF_A_NODE, RUN_INFO, SAMPLES, STEP_DURATION, STEPS

HALF_A_DAY = 720  # minutes
NODES = {"0": "10.0.0.1:9200", "1": "10.0.0.2:9200"}
RUN = {"job": "ddp", "job_id": "night"}
IDENTITY = {"run_uid": "0a1b2c3d4e5f", "user": "ann", "project": "vision"}
OTHERS_IDENTITY = {"run_uid": "999999999999", "user": "bob"}
OTHERS_NODES = {"0": "10.0.0.8:9200", "1": "10.0.0.9:9200"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``silent``, ``firing``, ``resolved``: minutes. ``labels`` and ``summary`` are those while it fires."""

    alert: str
    situation: str
    series: tuple[tuple[str, str], ...]
    silent: tuple[int, ...]  # healthy, or ill for too short
    firing: int
    resolved: int | None  # None: the life is about something else
    summary: str
    labels: dict[str, str] = field(default_factory=lambda: dict(IDENTITY))


def s(name: str, values: str, node: str = "0", **labels: str) -> tuple[str, str]:
    matchers = ",".join(f'{key}="{value}"' for key, value in of_node(node, **labels).items())
    return f"{name}{{{matchers}}}", values


def of_node(node: str, **labels: str) -> dict[str, str]:
    return {**RUN, "node": node, "instance": NODES[node], **labels}


def on(node: str, **labels: str) -> dict[str, str]:
    """The labels of an alert about a node or a rank."""
    return {**of_node(node), **IDENTITY, **labels}


WARNINGS = {"DdpNoFirstStep", "DdpHeartbeatMissing", "DdpScrapeDown", "DdpStraggler", "DdpDataBound", "DdpLowGoodput"}
WARNINGS |= {"DdpMixedVersions", "DdpClockSkew"}  # the others are critical

TRAINING = s("ddp_job_state", "1x300", state="training")
INFO = tuple(s("ddp_run_info", "1x800", node, run_id="night", **IDENTITY) for node in NODES)
STARTED = s("ddp_job_start_timestamp_seconds", "1x300")
FIRST_STEP = "night, started {} ago, waits for its first step, or for the first after a restart"


def ranks(alive: str, done: str, node: str = "0") -> tuple[tuple[str, str], ...]:
    return s("ddp_ranks_alive", alive, node), s("ddp_ranks_done", done, node)


MEETING = (s("ddp_world_size_expected", "4x200"), s("ddp_world_size", "0x9 4x200"))  # for ten minutes
CASES = (
    Case(
        alert="DdpNoFirstStep",
        situation="a first step of ddptrain that comes after half an hour",
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
        situation="a script that told of steps for ten minutes, was started again, and loads for half an hour",
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
        situation="an unchanged script whose nodes wait for each other for 20 minutes",
        series=(STARTED, s("ddp_job_state", "0x20 1x100", state="training")),
        silent=(0, 15, 16),
        firing=18,
        resolved=21,
        summary=FIRST_STEP.format("17m 59s"),
    ),
    Case(
        alert="DdpStalledStep",
        situation="ten minutes without a step",
        series=(TRAINING, s("ddp_last_step_timestamp_seconds", "0+60x10 600x10 1320+60x10", rank="0")),
        silent=(5, 13, 14),
        firing=18,
        resolved=23,
        summary="night has taken no step for 8m 0s",
    ),
    Case(
        alert="DdpStalledStep",
        situation="an evaluation of ten minutes, in which there are heartbeats, that hangs then",
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
        situation="rank 1 silent while rank 0 works on",
        series=(
            TRAINING,
            s("ddp_heartbeat_timestamp_seconds", "0+60x40", rank="0"),
            s("ddp_heartbeat_timestamp_seconds", "0+60x10 600x10 1320+60x10", rank="1"),
        ),
        silent=(5, 13, 14),
        firing=18,
        resolved=23,
        summary="rank 1 on node 0 of night has sent no heartbeat for 8m 0s",
        labels=on("0", rank="1"),
    ),
    Case(
        alert="DdpRanksMissing",
        situation="a node's ranks gone for ten minutes",
        series=(
            *MEETING,
            *ranks("0x9 2x200", "0x200"),
            *ranks("0x9 2x5 0x9 2x200", "0x200", "1"),
        ),
        silent=(5, 8, 14, 17),
        firing=19,
        resolved=26,
        summary="night lacks 2 of its ranks",
    ),
    Case(
        alert="DdpRanksMissing",
        situation="a machine that does not answer any more",
        series=(
            *MEETING,
            *ranks("0x9 2x200", "0x200"),
            *ranks("0x9 2x5 stale", "0x15 stale", "1"),
        ),
        silent=(5, 14, 17),
        firing=19,
        resolved=None,
        summary="night lacks 2 of its ranks",
    ),
    Case(
        alert="DdpRanksMissing",
        situation="a rank that is lost after one has ended with 0",
        series=(*MEETING, *ranks("0x9 2x10 1x200", "0x19 1x200"), *ranks("0x9 2x20 1x200", "0x200", "1")),
        silent=(15, 25, 31),
        firing=35,
        resolved=None,
        summary="night lacks 1 of its ranks",
    ),
    Case(
        alert="DdpScrapeDown",
        situation="a node that does not answer for six minutes",
        series=(s("up", "1x40"), s("up", "1x3 0x5 1x20", "1")),
        silent=(3, 5),
        firing=7,
        resolved=11,
        summary="node 1 of night does not answer at 10.0.0.2:9200",
        labels=of_node("1"),
    ),
    Case(
        alert="DdpStraggler",
        situation="rank 3 three times slower",
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
        situation="data for 10 %, then for half of each step",
        series=(
            s("ddp_step_phase_seconds_total", "0+6x10 90+30x19 666+6x30", rank="0", phase="data"),
            s("ddp_step_phase_seconds_total", "0+54x10 570+30x19 1194+54x30", rank="0", phase="forward"),
        ),
        silent=(10, 20),
        firing=28,
        resolved=38,
        summary="night spends 50% of its steps waiting for data",
        labels={"phase": "data", **IDENTITY},
    ),
    Case(
        alert="DdpLowGoodput",
        situation="an hour in which two thirds of the time are lost, after one in which a tenth is",
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
        situation="a slow start, which is no matter within the first hour",
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
        situation="no checkpoint for 75 minutes",
        series=(TRAINING, STARTED, s("ddp_checkpoint_last_success_timestamp_seconds", "0x4 300x75 4860x20", rank="0")),
        silent=(4, 64, 66),
        firing=70,
        resolved=82,
        summary="the newest checkpoint of night is 1h 5m 0s old",
    ),
    Case(
        alert="DdpCheckpointStale",
        situation="a run that has never saved",
        series=(TRAINING, STARTED, s("ddp_checkpoint_last_success_timestamp_seconds", "0x200", rank="0")),
        silent=(30, 60),
        firing=65,
        resolved=None,
        summary="the newest checkpoint of night is 1h 4m 59s old",
    ),
    Case(
        alert="DdpCheckpointFailing",
        situation="one checkpoint for which the disk was full",
        series=(s("ddp_checkpoint_failures_total", "0x5 1x40", rank="0", op="save", reason="enospc"),),
        silent=(5,),
        firing=7,
        resolved=22,
        summary="night could not save a checkpoint: enospc",
        labels={"op": "save", "reason": "enospc", **IDENTITY},
    ),
    Case(
        alert="DdpNonfinite",
        situation="one loss that is no number",
        series=(s("ddp_nonfinite_total", "0x5 1x40", rank="0", where="loss"),),
        silent=(5,),
        firing=7,
        resolved=22,
        summary="the loss of night is not finite any more",
        labels={"where": "loss", **IDENTITY},
    ),
    Case(
        alert="DdpRestartStorm",
        situation="three restarts in three minutes, each told by both nodes",
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
        alert="DdpCheckpointStale",
        situation="a run that was started again at a checkpoint of ten minutes before, and saves no other",
        series=(
            TRAINING,
            STARTED,
            s("ddp_checkpoint_last_success_timestamp_seconds", "0+60x190 stale 10860x90", rank="0"),
        ),
        silent=(100, 192, 200, 241),
        firing=245,
        resolved=None,
        summary="the newest checkpoint of night is 1h 4m 0s old",
    ),
    Case(
        alert="DdpMixedVersions",
        situation="a node with another torch, until it is restarted",
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
        situation="a clock that is behind for six minutes",
        series=(s("ddp_clock_offset_seconds", "0x40"), s("ddp_clock_offset_seconds", "0x3 -2.5x5 0x20", "1")),
        silent=(3, 4),
        firing=6,
        resolved=10,
        summary="node 1 of night has a clock that is 2.5s off",
        labels=on("1"),
    ),
)


def of_ddprun(
    *,
    restarted: bool = False,
    meets_after: int = 1,
    ends_early: bool = False,
    torch: str = "2.10.0",
    identity: dict[str, str] = IDENTITY,
) -> tuple[tuple[str, str], ...]:
    """All that two nodes of two ranks tell for half a day of a script that tells nothing.

    ``restarted``: all ranks start again in the sixth hour, which takes two minutes. ``meets_after``: minutes until the
    ranks are started. ``ends_early``: a rank of each node ends with 0 in the sixth hour.
    """
    n = HALF_A_DAY
    before = f"0x{meets_after - 1}"
    training, alive, restarts, done = f"{before} 1x{n}", f"{before} 2x{n}", f"0x{n}", f"0x{n}"
    if restarted:
        training, alive, restarts = f"0 1x358 0x1 1x{n}", f"0 2x358 0x1 2x{n}", f"0x359 1x{n}"
    if ends_early:
        alive, done = f"{before} 2x358 1x{n}", f"0x359 1x{n}"
    values = {
        ("ddp_job_start_timestamp_seconds", ()): f"1x{n}",
        ("ddp_build_info", (torch,)): f"1x{n}",
        ("ddp_run_info", ("night", *identity.values())): f"1x{n}",
        ("ddp_job_state", ("training",)): training,
        ("ddp_world_size", ()): f"{before} 4x{n}",
        ("ddp_world_size_expected", ()): f"4x{n}",
        ("ddp_ranks_alive", ()): alive,
        ("ddp_ranks_done", ()): done,
        ("ddp_restarts_total", ("killed",)): restarts,
    }
    series = []
    for metric in OF_A_NODE:
        each = [{label: value} for label, known in metric.labels.items() for value in known] or [{}]
        if metric is BUILD_INFO:
            each = [{"torch_version": torch}]
        if metric is RUN_INFO:
            each = [{"run_id": "night", **identity}]
        for node in NODES if metric.at_first else ():
            series.append(s("up", f"1x{n}", node))
            for labels in each:
                series.append(
                    s(metric.name, values.get((metric.name, tuple(labels.values())), f"0x{n}"), node, **labels)
                )
    return tuple(dict.fromkeys(series))


def of_loop(steps: str, last_step: str) -> tuple[tuple[str, str], ...]:
    """What a rank tells as soon as its script imports ddpwire.script."""
    names = (STEPS.name, SAMPLES.name, LAST_STEP.name, f"{STEP_DURATION.name}_sum", f"{STEP_DURATION.name}_count")
    series = {**dict.fromkeys(names, steps), LAST_STEP_TIME.name: last_step}
    return tuple(s(name, values, node, rank=node) for name, values in series.items() for node in NODES)


BEATS = tuple(s("ddp_heartbeat_timestamp_seconds", f"_x2 120+60x{HALF_A_DAY}", node, rank=node) for node in NODES)
IMPORTED = of_loop(f"_ 0x{HALF_A_DAY}", f"_ 0x{HALF_A_DAY}")
TOLD = of_loop(f"_ 0+9x{HALF_A_DAY}", f"_ 60+60x{HALF_A_DAY}")
# A rank that has ended with 0 gives no more heartbeats, and none that are exported.
ENDED_BEATS = (
    s("ddp_heartbeat_timestamp_seconds", "_x2 120+60x358 stale", "0", rank="0"),
    s("ddp_heartbeat_timestamp_seconds", f"_x2 120+60x{HALF_A_DAY}", "0", rank="1"),
)
SAVED_AND_RESTARTED = (  # every half an hour; the new ranks tell of the checkpoint that they continued from
    s(
        "ddp_checkpoint_last_success_timestamp_seconds",
        "0x29 "
        + " ".join(f"{60 * minute}x29" for minute in range(30, 360, 30))
        + " stale _ 19800x27 "
        + " ".join(f"{60 * minute}x29" for minute in range(390, HALF_A_DAY, 30)),
        rank="0",
    ),
)


def of_others(series: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The same of another user's run of the same name."""
    for node, instance in NODES.items():
        series = tuple((name.replace(instance, OTHERS_NODES[node]), values) for name, values in series)
    return series


SILENT_LIVES = {
    "an unchanged script": of_ddprun(),
    "an unchanged script that is started again": of_ddprun(restarted=True),
    "an unchanged script whose nodes meet after ten minutes": of_ddprun(meets_after=10),
    "an unchanged script of which a rank of each node ends hours before the others": of_ddprun(ends_early=True),
    "a script of which a rank that told of its life ends hours before the others": (
        *of_ddprun(ends_early=True),
        *ENDED_BEATS,
    ),
    "a training that saves, and is started again": (*of_ddprun(restarted=True), *SAVED_AND_RESTARTED),
    "two users' runs of one name, of which one waits ten minutes and has another torch": (
        *of_ddprun(),
        *of_others(of_ddprun(meets_after=10, torch="2.11.0", identity=OTHERS_IDENTITY)),
    ),
    "a run of an older ddprun, which has no id": of_ddprun(identity={}),
    "a script that imports ddpwire.script and tells nothing": (*of_ddprun(), *IMPORTED),
    "a script that only says that it lives": (*of_ddprun(), *IMPORTED, *BEATS),
    "a script that tells of its steps": (*of_ddprun(), *TOLD, *BEATS),
}
