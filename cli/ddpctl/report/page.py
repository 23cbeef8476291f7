"""The page of a report. One page does not need a template engine: string.Template, and every value escaped. Pure."""

import time
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from ddpctl import redact
from ddpctl.plan import title
from ddpctl.report.course_plots import plots
from ddpctl.report.plot import Mark, gantt
from ddpctl.report.scale import short
from ddpctl.report.style import STYLE
from ddpctl.report.tables import configuration, environments, happenings
from ddpctl.watch.material import Material
from ddpctl.watch.notable import BAD, notable, words
from ddpctl.watch.phases import totals
from ddpctl.words import one_line, plain, span
from ddpwire import rank_catalogue as of_ranks

LAST_LINES, MOST_MARKS = 40, 20
# A browser that keeps to this fetches nothing and runs nothing.
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
<footer>Made by ddpctl report $made. Times are counted from the launch.</footer>
</body>
</html>
""")


def page(found: Material, *, values: Iterable[str] = (), unsought: Sequence[str] = ()) -> str:
    """The whole file. ``values``: of secrets, which must not be in it; ``unsought``: those whose value nobody knew."""
    known = tuple(values)
    sections = _sections(found, known, unsought)
    run, status = found.run, found.status
    ending = f" (exit code {status.code})" if status.code else ""
    return PAGE.substitute(
        policy=POLICY,
        name=escape(run.name),
        state=escape(status.state),
        style=STYLE,
        message=escape(redact.text(one_line(f"{status.message}{ending}"), known)),
        what=escape(f"{title(run.job)} on {run.target if run.target == run.kind else f'{run.target}, {run.kind}'}"),
        launched=_date(run.created),
        tiles="".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
                      for what, value in _tiles(found)),
        sections="".join(f"<h2>{escape(heading)}</h2>\n{body}\n" for heading, body in sections),
        made=_date(found.now),
    )  # fmt: skip


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def _end(found: Material) -> float:
    return found.spans[-1].end if found.spans else max(found.course.end, found.run.created)


def _tiles(found: Material) -> list[tuple[str, str]]:
    course, passed_s = found.course, _end(found) - found.run.created
    tiles = [("from launch to end" if found.status.ended else "since the launch", span(passed_s))] if passed_s else []
    step, planned = course.last(of_ranks.LAST_STEP.name), course.last(of_ranks.STEPS_PLANNED.name)
    if step is not None:
        tiles.append(("steps", f"{step:,.0f}" + (f" of {planned:,.0f}" if planned and planned != step else "")))
    loss, accuracy = course.last(of_ranks.LOSS.name), course.last(f"{of_ranks.EVAL_ACCURACY.name}:test")
    tiles += [] if loss is None else [("loss", f"{loss:.4g}")]
    tiles += [] if accuracy is None else [("test accuracy", f"{100 * accuracy:.2f} %")]
    training_s = totals(found.spans).get("training", 0.0)
    if (samples := course.total(of_ranks.SAMPLES.name)) and training_s:
        tiles.append(("samples a second, training", short(samples / training_s)))
    productive = course.total(of_ranks.PRODUCTIVE.name)
    lost = sum(course.total(f"{of_ranks.UNPRODUCTIVE.name}:{cause}") for cause in of_ranks.UNPRODUCTIVE_CAUSES)
    tiles += [("goodput", f"{100 * productive / (productive + lost):.0f} %")] if productive else []
    restarts = len({event.attempt for event in found.events if event.event == "restart"})
    tiles.append(("restarts", str(restarts)))
    return tiles


def _sections(found: Material, known: tuple[str, ...], unsought: Sequence[str]) -> list[tuple[str, str]]:
    begin, seconds = found.run.created, _end(found) - found.run.created
    told = notable(found.events)
    marks = [
        Mark(
            at=event.time - begin,
            style="bad" if event.event in BAD else "",
            words=redact.text(one_line(words(event)), known),
        )
        for event in told
    ]
    sections = []
    if found.said:
        lines = redact.text("\n".join(plain(found.said.rstrip("\n")).split("\n")[-LAST_LINES:]), known)
        sections.append((f"What {found.said_by} said last", f"<pre>{escape(lines)}</pre>"))
    if found.spans:
        bars = gantt(found.spans, totals(found.spans), begin=begin, seconds=seconds)
        sections.append(("Where the time went", f"{bars}{_key(marks)}"))
    for heading, picture, key in plots(found.course, begin=begin, seconds=seconds, marks=marks):
        sections.append((heading, f"{picture}{key}"))
    if found.silent:
        said = "; ".join(found.silent)
        sections.append(("Nodes that could not be asked", f"<p>{escape(redact.text(said, known))}</p>"))
    if found.environments:
        sections.append(("The nodes", environments(found.environments, known)))
    sections.append(("What was asked for", configuration(found.run, known)))
    if unsought:
        said = f"{', '.join(unsought)}: not set where this was made, or too short: look for the value by yourself."
        sections.append(("Secrets that could not be looked for", f"<p>{escape(said)}</p>"))
    if found.events:
        sections.append(("What happened", happenings(found.events, begin, known)))
    return sections


def _key(marks: Sequence[Mark]) -> str:
    """What the dashed lines in the plots stand for."""
    said = [f"<li>{span(mark.at)}: {escape(mark.words)}</li>" for mark in marks[:MOST_MARKS]]
    if len(marks) > MOST_MARKS:
        said.append(f"<li>and {len(marks) - MOST_MARKS} more</li>")
    return f'<p class="key">Dashed lines in the plots:</p><ul class="key">{"".join(said)}</ul>' if said else ""
