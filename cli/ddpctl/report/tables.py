"""The tables of a report: what the nodes had, what was asked for, what happened. Pure; secrets are taken out here."""

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from html import escape

from ddpctl import redact
from ddpctl.plan import command_line
from ddpctl.run import Run
from ddpctl.spec import JobSpec
from ddpctl.words import one_line, span
from ddpwire.events import Event

ALWAYS = ("nodes", "gpus", "device")  # of a job; what else is as everybody has it is left out
MOST_EVENTS = 300
_CAUSES = {  # ddpwire.outcome.Cause
    "ok": "done",
    "error": "an error of its own",
    "killed": "killed by a signal that nobody here sent",
    "oom": "out of memory",
    "hang": "it hung",
    "stopped": "a stop that was asked for",
    "node_lost": "a node was lost",
    "gave_up": "no progress, again and again",
    "absent": "not all nodes came in time",
    "unavailable": "an address or a port could not be had",
    "internal": "a fault of ddprun",
}
_NAMES = {"number of ranks": "ranks on the node"}


def environments(given: Mapping[int, Mapping[str, str]], values: Iterable[str] = ()) -> str:
    """A column a node; nodes that have the same are one column, and what differs stands out."""
    known = tuple(values)
    found = {
        node: {_NAMES.get(key, one_line(key)): one_line(value) for key, value in redact.mapping(had, known).items()}
        for node, had in given.items()
    }
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for node, words in sorted(found.items()):
        groups.setdefault(tuple((key, value) for key, value in words.items() if key != "host"), []).append(node)
    hosts = [", ".join(dict.fromkeys(found[node].get("host", "?") for node in nodes)) for nodes in groups.values()]
    head = "".join(f"<th>node{'s' * (len(nodes) > 1)} {_spans(nodes)}</th>" for nodes in groups.values())
    keys = list(dict.fromkeys(key for words in groups for key, _ in words))
    rows = [f"<tr><th>host</th>{''.join(f'<td>{escape(host)}</td>' for host in hosts)}</tr>"]
    for key in keys:
        values = [dict(words).get(key, "-") for words in groups]
        style = ' class="other"' if len(set(values)) > 1 else ""
        rows.append(f"<tr{style}><th>{escape(key)}</th>{''.join(f'<td>{escape(one)}</td>' for one in values)}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _spans(nodes: Sequence[int]) -> str:
    """0 to 7, 9."""
    runs: list[list[int]] = []
    for node in nodes:
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def configuration(run: Run, values: Iterable[str]) -> str:
    """The job and its target as they were asked for. ``values``: of secrets, wherever they stand."""
    known, job, plain = tuple(values), run.job, JobSpec()
    command = redact.words(job.command, known)
    shown = {"program": command_line(replace(job, command=tuple(command)))}
    for item in fields(JobSpec):
        value = getattr(job, item.name)
        if item.name in ("command", "name", "env") or (value == getattr(plain, item.name) and item.name not in ALWAYS):
            continue
        shown[item.name] = ", ".join(value) if isinstance(value, tuple) else str(value)
    shown |= {f"env {key}": value for key, value in redact.mapping(job.env, known).items()}
    shown |= {"target": run.target if run.target == run.kind else f"{run.target} ({run.kind})"}
    options = {key: value for key, value in run.options.items() if value not in (None, "", [], {}, ())}
    shown |= {f"{run.kind} {key}": value for key, value in redact.mapping(options, known).items()}
    shown |= {"folder": run.cwd, "checkpoints": run.checkpoint_dir, "started by": f"ddpctl {run.version}"}
    rows = (
        f'<tr><th>{escape(key)}</th><td class="mono">{escape(one_line(redact.text(value, known)))}</td></tr>'
        for key, value in shown.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _fact(key: str, value: object) -> str:
    """A fact of an event in words."""
    if key == "status" and type(value) is int:
        known = {-number.value: number.name for number in signal.Signals}
        return f"exit code {value}" if value >= 0 else f"ended by {known.get(value, f'signal {-value}')}"
    if key == "cause" and isinstance(value, str):
        return _CAUSES.get(value, value)
    return f"{key} {value}"


def happenings(events: Sequence[Event], begin: float, values: Iterable[str]) -> str:
    """A row an event; of very many the first and the last."""
    known, rows = tuple(values), []
    shown = list(events)
    if len(shown) > MOST_EVENTS:
        left_out = len(shown) - MOST_EVENTS
        rows.append(f'<tr><td colspan="4" class="soft">{left_out} events are left out between these</td></tr>')
        shown = shown[: MOST_EVENTS // 2] + shown[-MOST_EVENTS // 2 :]
    for index, event in enumerate(shown):
        who = f"node {event.node}" if event.rank is None else f"node {event.node}, rank {event.rank}"
        facts = {"step": event.step, "seconds": event.seconds, **event.facts}
        said = ", ".join(_fact(key, value) for key, value in facts.items() if value not in (None, ""))
        what = one_line(event.event.replace("_", " "))
        cells = (span(event.time - begin), who, what, redact.text(one_line(said), known))
        row = f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
        rows.insert(index if index < MOST_EVENTS // 2 else len(rows), row)
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'
