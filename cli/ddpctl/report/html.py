"""The HTML page of a report, with its sections, tables and style. This module escapes values and removes secrets."""

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from html import escape
from string import Template
from typing import Any

from ddpctl.job import secrets
from ddpctl.job.launch_plan import command_line, title
from ddpctl.job.spec import JobSpec
from ddpctl.report.svg import Mark, gantt_chart, history_plots, short
from ddpctl.runs.run_store import Run
from ddpctl.text import format_duration, number, one_line, plain
from ddpctl.watch.timeline import BAD, Timeline, describe_event, phase_shares, phase_totals, timeline_events
from ddpwire import metrics as of_ranks
from ddpwire.events import Event
from ddpwire.machine import enumerate_ranges

LAST_LINES, MOST_MARKS = 40, 20

# With this policy, a browser loads nothing and runs no script.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$name: $state</title>
<style>$style</style>
</head>
<body>
<h1>$name<span class="badge $state">$state</span></h1>
<p>$message</p>
<p class="soft">$what, launched $launched</p>
<div class="tiles">$tiles</div>
$sections
<footer>Made by ddpctl report $made. Times are counted from the $begin.</footer>
</body>
</html>
""")
ALWAYS = ("nodes", "gpus", "device")  # fields of a job that are shown even if they have the default value
MOST_EVENTS = 300
NO_LOSS = "The run has reported no loss. docs/script.md shows how a script reports its loss."
FEW_LOSSES = "The run has reported too few values of its loss for a plot."


def render_page(
    found: Timeline,
    *,
    why: str = "",
    values: Iterable[str] = (),
    unsought: Sequence[str] = (),
    checks: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Return the text of the HTML file.

    ``why`` is the cause of a failure. ``values`` are the secrets to remove. ``unsought`` are the names of secrets that
    cannot be removed. ``checks`` are the results of bench and doctor on the run's target.
    """
    known = tuple(values)
    sections = _sections(found, known, unsought)
    for one in checks:
        text = secrets.redact_text(plain("\n".join(one["lines"])), known)
        heading = one_line(f"ddpctl {one['check']} of {found.run.target}, {_date(one['time'])}")
        sections.append((heading, f"<pre>{escape(text)}</pre>"))
    run, status = found.run, found.status
    ending = (f" (exit code {status.code})" if status.code else "") + (f"; why: {why}" if why else "")
    return PAGE.substitute(
        policy=POLICY,
        name=escape(run.name),
        state=escape(status.state),
        style=STYLE,
        message=escape(secrets.redact_text(one_line(f"{status.message}{ending}"), known)),
        what=escape(f"{title(run.job)} on {run.target if run.target == run.kind else f'{run.target}, {run.kind}'}"),
        launched=_date(run.created),
        tiles="".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
                      for what, value in _tiles(found)),
        sections="".join(f"<h2>{escape(heading)}</h2>\n{body}\n" for heading, body in sections),
        made=_date(found.now),
        begin="launch" if found.begin == run.created else "first start",
    )  # fmt: skip


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def _tiles(found: Timeline) -> list[tuple[str, str]]:
    history, passed_s, seconds = found.history, found.end - found.run.created, phase_totals(found.spans)
    step, planned = history.last(of_ranks.LAST_STEP.name), history.last(of_ranks.STEPS_PLANNED.name)
    of_planned = f" of {planned:,.0f}" if planned and planned != step else ""
    loss, accuracy = history.last(of_ranks.LOSS.name), history.last(f"{of_ranks.EVAL_ACCURACY.name}:test")
    samples, training_s = history.total(of_ranks.SAMPLES.name), seconds.get("training", 0.0)
    tiles = {
        "from launch to end" if found.status.ended else "since the launch": passed_s and format_duration(passed_s),
        "in the queue": "queue" in seconds and format_duration(seconds["queue"]),
        "steps": step is not None and f"{step:,.0f}{of_planned}",
        "loss": loss is not None and number(loss),
        "test accuracy": accuracy is not None and f"{100 * accuracy:.2f} %",
        "samples per second, training": samples and training_s and short(samples / training_s),
        "goodput": history.goodput is not None and f"{100 * history.goodput:.0f} %",
        "restart" if found.restarts == 1 else "restarts": str(found.restarts),
    }
    return [(what, str(value)) for what, value in tiles.items() if value]


def _sections(found: Timeline, known: tuple[str, ...], unsought: Sequence[str]) -> list[tuple[str, str]]:
    begin, seconds = found.begin, found.end - found.begin
    marks = []
    for event in timeline_events(found.events):
        words = secrets.redact_text(one_line(describe_event(event)), known)
        marks.append(Mark(at=event.time - begin, style="bad" if event.event in BAD else "", words=words))
    sections = []
    if found.last_lines:
        lines = secrets.redact_text("\n".join(plain(found.last_lines.rstrip("\n")).split("\n")[-LAST_LINES:]), known)
        sections.append((f"Last output of {found.last_lines_of}", f"<pre>{escape(lines)}</pre>"))
    if found.spans:
        bars = gantt_chart(found.spans, phase_shares(found.spans), begin=begin, seconds=seconds)
        sections.append(("How the time was spent", f"{bars}{_key(marks)}"))
    plots = history_plots(found.history, begin=begin, seconds=seconds, marks=marks)
    sections += [(heading, f"{picture}{key}") for heading, picture, key in plots]
    if "Loss" not in {heading for heading, _, _ in plots}:
        has_loss = any(of_ranks.LOSS.name in row for rows in found.history.nodes.values() for row in rows)
        sections.append(("Loss", f"<p>{FEW_LOSSES if has_loss else NO_LOSS}</p>"))
    if found.silent:
        text = "; ".join(found.silent)
        sections.append(("Nodes that did not answer", f"<p>{escape(secrets.redact_text(text, known))}</p>"))
    if found.environments:
        sections.append(("The nodes", environments_table(found.environments, known)))
    sections.append(("Configuration", configuration_table(found.run, known)))
    if unsought:
        text = f"{', '.join(unsought)}: not removed (not set here, or too short). Search the report for the values."
        sections.append(("Secrets that could not be checked", f"<p>{escape(text)}</p>"))
    if found.events:
        sections.append(("Events", events_table(found.events, begin, known)))
    return sections


def _key(marks: Sequence[Mark]) -> str:
    items = [f"<li>{format_duration(mark.at)}: {escape(mark.words)}</li>" for mark in marks[:MOST_MARKS]]
    if len(marks) > MOST_MARKS:
        items.append(f"<li>and {len(marks) - MOST_MARKS} more</li>")
    return (
        f'<p class="key">Events, which are dashed lines in plots:</p><ul class="key">{"".join(items)}</ul>'
        if items
        else ""
    )


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
    "internal": "a fault of ddprun",
}
_NAMES = {"number of ranks": "ranks on the node"}


def environments_table(given: Mapping[int, Mapping[str, str]], values: Iterable[str] = ()) -> str:
    """Return a table with a column for each group of nodes with equal values. Rows with differences are highlighted."""
    known = tuple(values)
    hosts: dict[int, str] = {}
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for node, facts in sorted(given.items()):
        shown = {one_line(key): one_line(value) for key, value in secrets.redact_mapping(facts, known).items()}
        hosts[node] = shown.pop("host", "?")
        groups.setdefault(tuple((_NAMES.get(key, key), value) for key, value in shown.items()), []).append(node)
    head = "".join(f"<th>node{'s' * (len(nodes) > 1)} {enumerate_ranges(nodes)}</th>" for nodes in groups.values())
    cells = (", ".join(dict.fromkeys(hosts[node] for node in nodes)) for nodes in groups.values())
    rows = [f"<tr><th>host</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"]
    for key in dict.fromkeys(key for facts in groups for key, _ in facts):
        values = [dict(facts).get(key, "-") for facts in groups]
        style = ' class="other"' if len(set(values)) > 1 else ""
        rows.append(f"<tr{style}><th>{escape(key)}</th>{''.join(f'<td>{escape(one)}</td>' for one in values)}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def configuration_table(run: Run, values: Iterable[str]) -> str:
    """Return a table of the job and its target. ``values`` are the secrets to remove."""
    known, job, plain = tuple(values), run.job, JobSpec()
    command = secrets.redact_command(job.command, known)
    shown = {"program": command_line(replace(job, command=tuple(command)))}
    for item in fields(JobSpec):
        value = getattr(job, item.name)
        if item.name in ("command", "name", "env") or (value == getattr(plain, item.name) and item.name not in ALWAYS):
            continue
        name = "ranks" if item.name == "gpus" and job.device == "cpu" else item.name
        shown[name] = ", ".join(value) if isinstance(value, tuple) else str(value)
    shown |= {f"env {key}": value for key, value in secrets.redact_mapping(job.env, known).items()}
    shown |= {"target": run.target if run.target == run.kind else f"{run.target} ({run.kind})"}
    options = {key: value for key, value in run.options.items() if value not in (None, "", [], {}, ())}
    shown |= {f"{run.kind} {key}": value for key, value in secrets.redact_mapping(options, known).items()}
    shown |= {"folder": run.cwd, "checkpoints": run.checkpoint_dir, "started by": f"ddpctl {run.version}"}
    rows = (
        f'<tr><th>{escape(key)}</th><td class="mono">{escape(one_line(secrets.redact_text(value, known)))}</td></tr>'
        for key, value in shown.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _fact(event: str, key: str, value: object) -> str:
    if (event, key, value) == ("rank_exited", "cause", "stopped"):
        return "ended by ddprun: another rank had failed, or a stop was requested"
    if key == "status" and type(value) is int:
        known = {-number.value: number.name for number in signal.Signals}
        return f"exit code {value}" if value >= 0 else known.get(value, f"signal {-value}")
    if key == "cause" and isinstance(value, str):
        return _CAUSES.get(value, f"{key} {value}")
    return f"{key} {value}"


def events_table(events: Sequence[Event], begin: float, values: Iterable[str]) -> str:
    """Return a table with a row for each event.

    If there are more than ``MOST_EVENTS`` events, leave out those in the middle.
    """
    known, rows = tuple(values), []
    shown = list(events)
    if len(shown) > MOST_EVENTS:
        left_out = len(shown) - MOST_EVENTS
        rows.append(f'<tr><td colspan="4" class="soft">{left_out} events are left out here</td></tr>')
        shown = shown[: MOST_EVENTS // 2] + shown[-MOST_EVENTS // 2 :]
    for index, event in enumerate(shown):
        who = f"node {event.node}" if event.rank is None else f"node {event.node}, rank {event.rank}"
        facts = {"step": event.step, "seconds": event.seconds, **event.facts}
        text = ", ".join(_fact(event.event, key, value) for key, value in facts.items() if value not in (None, ""))
        what = one_line(event.event.replace("_", " "))
        cells = (format_duration(event.time - begin), who, what, secrets.redact_text(one_line(text), known))
        row = f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
        rows.insert(index if index < MOST_EVENTS // 2 else len(rows), row)
    return f'<div class="wide"><table class="events">{"".join(rows)}</table></div>'


# From https://colorbrewer2.org: people with red-green color blindness can distinguish these colors.
PHASES = {
    "data": "#80b1d3",
    "h2d": "#8dd3c7",
    "forward": "#4daf4a",
    "backward": "#1b7837",
    "comm_exposed": "#e08214",
    "optimizer": "#e6c229",
    "other": "#9a9a9a",
    "queue": "#bdbdbd",
    "start": "#9e9ac8",
    "preflight": "#80b1d3",
    "rendezvous": "#4292c6",
    "import": "#2171b5",
    "restore": "#8dd3c7",
    "first-step": "#e6c229",
    "training": "#1b7837",
    "running": "#1b7837",
    "evaluation": "#4daf4a",
    "checkpoints": "#b07aa1",
    "lost": "#c0392b",
    "end": "#bdbdbd",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #626a73; --paper: #fff; --card: #f6f7f9; --rule: #dfe3e8;
  --bad: #c0392b; --line: #2171b5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4af; --paper: #15181c; --card: #1e2329;
  --rule: #323a43; --bad: #ef6b5b; --line: #6baed6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; }
h2 { margin: 32px 0 8px; font-size: 17px; }
p { margin: 4px 0; }
.soft { color: var(--soft); }
pre, .mono { font-family: ui-monospace, monospace; font-size: 13px; }
.badge { display: inline-block; margin-left: 10px; padding: 2px 10px; border-radius: 12px; color: #fff;
  font-size: 14px; vertical-align: 4px; background: #626a73; }
.badge.succeeded, .badge.training { background: #1b7837; }
.badge.failed, .badge.lost { background: #c0392b; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0; }
.tile { flex: 1 1 120px; padding: 10px 14px; border-radius: 8px; background: var(--card); }
.tile b { display: block; font-size: 20px; }
.tile span { color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: system-ui, sans-serif; }
svg .label { fill: var(--ink); font-size: 13px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.dot { fill: var(--line); }
.hover { fill: transparent; }
.hover:hover { fill: var(--ink); fill-opacity: .08; }
.mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; }
.mark.bad { stroke: var(--bad); stroke-width: 2; }
.key { color: var(--soft); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; border-radius: 2px; }
.key i:first-child { margin-left: 0; }
table { border-collapse: collapse; width: 100%; }
.wide { overflow-x: auto; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td.mono { overflow-wrap: anywhere; }
.events td:not(:last-child) { white-space: nowrap; }
.events td:last-child { overflow-wrap: anywhere; min-width: 260px; }
tr.other td { color: var(--bad); font-weight: 600; }
pre { padding: 12px; border-radius: 8px; background: var(--card); overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
footer { margin-top: 36px; color: var(--soft); font-size: 13px; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } svg, .tiles { break-inside: avoid; } }
""" + "".join(
    f".area.{name}, .bar.phase-{name}, .key .{name} {{ fill: {colour}; background: {colour}; }}\n"
    for name, colour in PHASES.items()
)  # fmt: skip
