"""The HTML page of a report. This module collects the values and removes secrets; report.html lays them out.

jinja2 escapes each value.
"""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpctl.job import secrets
from ddpctl.job.launch_plan import command_line, title
from ddpctl.job.spec import JobSpec
from ddpctl.report.charts import WIDTH, Mark, gantt_chart, history_charts, short
from ddpctl.runs.run_store import Run
from ddpctl.text import format_duration, number, one_line, plain
from ddpctl.watch.timeline import BAD, Timeline, describe_event, phase_shares, phase_totals, timeline_events
from ddpwire import metrics as of_ranks
from ddpwire.events import Event
from ddpwire.machine import enumerate_ranges

LAST_LINES = 40
ALWAYS = ("nodes", "gpus", "device")  # fields of a job that are shown even if they have the default value
MOST_EVENTS = 300
Clean = Callable[[str], str]  # makes a text one line without secrets


@cache
def environment() -> Environment:
    """Return the environment of the templates in this package, which escape each value."""
    return Environment(
        loader=PackageLoader("ddpctl.report", ""), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )


def render_page(
    timeline: Timeline,
    *,
    reason: str = "",
    values: Sequence[str] = (),
    unsought: Sequence[str] = (),
    checks: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Return the text of the HTML file.

    ``why`` is the cause of a failure. ``values`` are the secrets to remove. ``unsought`` are the names of secrets that
    cannot be removed. ``checks`` are the results of bench and doctor on the run's target.
    """

    def clean(text: str) -> str:
        return secrets.redact_text(one_line(text), values)

    run, status, history = timeline.run, timeline.status, timeline.history
    begin, seconds = timeline.begin, timeline.end - timeline.begin
    marks = [
        Mark(at=event.time - begin, style="bad" if event.event in BAD else "", text=clean(describe_event(event)))
        for event in timeline_events(timeline.events)
    ]
    charts = history_charts(history, begin=begin, seconds=seconds, marks=marks)
    ending = (f" (exit code {status.code})" if status.code else "") + (f"; why: {reason}" if reason else "")
    last_lines = plain(timeline.last_lines.rstrip("\n")).split("\n")[-LAST_LINES:]
    phases = None
    if timeline.spans:
        phases = gantt_chart(timeline.spans, phase_shares(timeline.spans), begin=begin, seconds=seconds)
    return environment().get_template("report.html").render(
        width=WIDTH,
        timeline=timeline,
        message=clean(f"{status.message}{ending}"),
        job=f"{title(run.job)} on {run.target if run.target == run.kind else f'{run.target}, {run.kind}'}",
        launched=_date(run.created),
        tiles=_tiles(timeline),
        last_lines=secrets.redact_text("\n".join(last_lines), values),
        phases=phases,
        events_of_plots=[f"{format_duration(mark.at)}: {mark.text}" for mark in marks],
        charts=charts,
        has_loss=bool(history.points(of_ranks.LOSS.name)),
        silent=secrets.redact_text("; ".join(timeline.silent), values),
        environments=timeline.environments and environments_table(timeline.environments, values),
        configuration=configuration_table(run, values),
        unsought=unsought,
        events=event_rows(timeline.events, begin, clean),
        checks=[
            (
                one_line(f"ddpctl {check['check']} of {run.target}, {_date(check['time'])}"),
                secrets.redact_text(plain("\n".join(check["lines"])), values),
            )
            for check in checks
        ],
        made=_date(timeline.now),
        begin="launch" if begin == run.created else "first start",
    )  # fmt: skip


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def _tiles(timeline: Timeline) -> dict[str, object]:
    """Return the values of the tiles by their labels. Tiles without a value are left out."""
    history, seconds = timeline.history, phase_totals(timeline.spans)
    passed_s = timeline.end - timeline.run.created
    step, planned = history.last(of_ranks.LAST_STEP.name), history.last(of_ranks.STEPS_PLANNED.name)
    of_planned = f" of {planned:,.0f}" if planned and planned != step else ""
    loss, accuracy = history.last(of_ranks.LOSS.name), history.last(f"{of_ranks.EVAL_ACCURACY.name}:test")
    samples, training_s = history.total(of_ranks.SAMPLES.name), seconds.get("training", 0.0)
    return {
        "from launch to end" if timeline.status.ended else "since the launch": passed_s and format_duration(passed_s),
        "in the queue": "queue" in seconds and format_duration(seconds["queue"]),
        "steps": step is not None and f"{step:,.0f}{of_planned}",
        "loss": loss is not None and number(loss),
        "test accuracy": accuracy is not None and f"{100 * accuracy:.2f} %",
        "samples per second, training": samples and training_s and short(samples / training_s),
        "goodput": history.goodput is not None and f"{100 * history.goodput:.0f} %",
        "restart" if timeline.restarts == 1 else "restarts": str(timeline.restarts),
    }


_CAUSES = {  # ddpwire.run_files.Cause
    "ok": "done",
    "error": "an error of the script",
    "killed": "ended by a signal from outside",
    "oom": "out of memory",
    "hang": "a hang",
    "stopped": "a requested stop",
    "node_lost": "a node was lost",
    "gave_up": "several attempts without progress",
    "absent": "not all nodes joined in time",
    "unavailable": "an address or a port was not available",
    "config": "a wrong configuration, or nodes that do not match",
    "setup": "a failure of node_setup",
    "internal": "a fault of ddprun",
}
_NAMES = {"number of ranks": "ranks on the node"}


def environments_table(
    environments: Mapping[int, Mapping[str, str]], values: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Return ``nodes``, the titles of groups of nodes with equal values, and ``rows``, each with a value per group."""
    hosts: dict[int, str] = {}
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for node, facts in sorted(environments.items()):
        shown = {one_line(key): one_line(value) for key, value in secrets.redact_mapping(facts, values).items()}
        hosts[node] = shown.pop("host", "?")
        shown.pop("packages", None)  # ddpctl explain names those that differ
        groups.setdefault(tuple((_NAMES.get(key, key), value) for key, value in shown.items()), []).append(node)
    keys = dict.fromkeys(key for facts in groups for key, _ in facts)
    return {
        "nodes": [f"node{'s' * (len(nodes) > 1)} {enumerate_ranges(nodes)}" for nodes in groups.values()],
        "rows": [
            ("host", [", ".join(dict.fromkeys(hosts[node] for node in nodes)) for nodes in groups.values()]),
            *((key, [dict(facts).get(key, "-") for facts in groups]) for key in keys),
        ],
    }


def configuration_table(run: Run, values: Sequence[str]) -> dict[str, str]:
    """Return the job and its target, without the secrets ``values``."""
    job, default = run.job, JobSpec()
    command = secrets.redact_command(job.command, values)
    shown = {"program": command_line(replace(job, command=tuple(command)))}
    for item in fields(JobSpec):
        value = getattr(job, item.name)
        if item.name in ("command", "name", "env") or (
            value == getattr(default, item.name) and item.name not in ALWAYS
        ):
            continue
        name = "ranks" if item.name == "gpus" and job.device == "cpu" else item.name
        shown[name] = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    shown |= {f"env {key}": value for key, value in secrets.redact_mapping(job.env, values).items()}
    shown |= {"target": run.target if run.target == run.kind else f"{run.target} ({run.kind})"}
    options = {key: value for key, value in run.options.items() if value not in (None, "", [], {}, ())}
    shown |= {f"{run.kind} {key}": value for key, value in secrets.redact_mapping(options, values).items()}
    shown |= {"folder": run.cwd, "checkpoints": run.checkpoint_dir, "started by": f"ddpctl {run.version}"}
    return {key: one_line(secrets.redact_text(value, values)) for key, value in shown.items()}


def _fact(event: str, key: str, value: object) -> str:
    if (event, key, value) == ("rank_exited", "cause", "stopped"):
        return "ended by ddprun: another rank had failed, or a stop was requested"
    if key == "status" and type(value) is int:
        names = {-number.value: number.name for number in signal.Signals}
        return f"exit code {value}" if value >= 0 else names.get(value, f"signal {-value}")
    if key == "cause" and isinstance(value, str):
        return _CAUSES.get(value, f"{key} {value}")
    return f"{key} {value}"


def event_rows(events: Sequence[Event], begin: float, clean: Clean) -> list[tuple[str, ...] | str]:
    """Return the cells of each event.

    If there are more than ``MOST_EVENTS`` events, a sentence replaces those in the middle.
    """
    rows: list[tuple[str, ...] | str] = []
    for event in events:
        who = f"node {event.node}" if event.rank is None else f"node {event.node}, rank {event.rank}"
        facts = {"step": event.step, "seconds": event.seconds, **event.facts}
        text = ", ".join(_fact(event.event, key, value) for key, value in facts.items() if value not in (None, ""))
        kind = one_line(event.event.replace("_", " "))
        rows.append((format_duration(event.time - begin), who, kind, clean(text)))
    if (left_out := len(rows) - MOST_EVENTS) > 0:
        rows[MOST_EVENTS // 2 : -MOST_EVENTS // 2] = [f"{left_out} events are left out here"]
    return rows
