"""Draws a snapshot for ``ddpctl top``, as a screen with rich or as one line.

This module is separate from ``commands/watch``, because ``ddpctl top --help`` must not import rich.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpctl.commands.formatting import ago
from ddpctl.text import number, one_line
from ddpctl.watch.snapshot import RankRow, Snapshot
from ddpwire.metrics import STEP_PHASES

WIDE, MIDDLE, NARROW = 76, 56, 40  # a terminal with at least this many columns shows more details
# The letter and the color of each phase of a step.
DRAWN = {
    "data": ("d", "black on bright_blue"),
    "h2d": ("h", "black on magenta"),
    "forward": ("f", "black on green"),
    "backward": ("b", "black on cyan"),
    "comm_exposed": ("w", "black on red"),
    "optimizer": ("o", "black on yellow"),
    "other": (".", "black on bright_black"),
}
STATES = dict.fromkeys(("running", "training", "succeeded"), "bold green") | {"failed": "bold red", "lost": "bold red"}
LABEL = 11
PHASES = "WHERE IT GOES"
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def screen(snapshot: Snapshot, *, title: str, width: int, height: int | None, plain: bool) -> RenderableType:
    """Draw the full screen, with at most ``height`` lines (None: no limit). If ``plain``, use only ASCII."""
    ending = "" if snapshot.code is None else f", exit code {snapshot.code}"
    state = (f"{snapshot.state}{ending}", STATES.get(snapshot.state, "bold"))
    head = Text.assemble((snapshot.run, "bold"), "  ", state, (f"  {title}" if width >= MIDDLE else "", "dim"))
    steps = snapshot.state == "training" and snapshot.step is not None
    message = [] if steps else [Text(one_line(snapshot.message))]
    numbers = _numbers(snapshot, width, plain=plain)
    numbers += [Text(one_line(silent), style="yellow") for silent in snapshot.silent]
    if not snapshot.ranks:  # without a table, the full message fits
        return Group(_cut(head, width), *message, *(_cut(line, width) for line in numbers))
    lines = [head, *message, *numbers]
    has_phases = width >= MIDDLE and _any(snapshot.ranks, "phases")
    above, below = [_cut(line, width) for line in (*lines, Text())], list[Text]()
    legend = [_cut(line, width) for line in _legend(width)] if has_phases else []
    rows = list(snapshot.ranks)
    max_rows = len(rows) if height is None else max(1, height - len(lines) - 2 - len(legend))
    if len(rows) > max_rows:  # show the slowest ranks
        num_shown = max(max_rows, 2) - 1
        rows.sort(key=lambda row: (row.silent_s or 0.0, row.slow or 0.0, row.own_s or 0.0), reverse=True)
        below = [Text(f"and {len(rows) - num_shown} more ranks, none of them slower", style="dim")]
        rows = sorted(rows[:num_shown], key=lambda row: row.rank)
    return Group(*above, _table(rows, width), *below, *legend)


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis" if width > NARROW else "crop")
    return line


def _numbers(snapshot: Snapshot, width: int, *, plain: bool) -> list[Text]:
    lines = []
    if snapshot.step is not None:
        line = _label("step")
        if snapshot.planned:
            share = snapshot.step / snapshot.planned
            bar = meter(share, 20 if width >= WIDE else 8, plain=plain)
            line.append(f"{snapshot.step:,} of {snapshot.planned:,}  {bar} {100 * share:.0f} %")
        else:
            line.append(f"{snapshot.step:,}")
        if snapshot.left_s is not None and snapshot.state == "training":
            line.append(f"  {ago(snapshot.left_s)} left")
        if snapshot.epoch is not None:
            line.append(f"  epoch {snapshot.epoch}")
        lines.append(line)
    columns = max(8, min(60, width - LABEL - 26))
    if snapshot.samples_per_s is not None or any(snapshot.throughput):
        text = "" if snapshot.samples_per_s is None else f"{snapshot.samples_per_s:,.0f} samples/s"
        lines.append(_label("throughput") + Text(f"{text:<22}") + _spark(snapshot.throughput, columns, plain=plain))
    if snapshot.loss is not None:
        test = "" if snapshot.accuracy is None else f"  test {100 * snapshot.accuracy:.1f} %"
        text = f"{number(snapshot.loss)}{test}"
        lines.append(_label("loss") + Text(f"{text:<22}") + _spark(snapshot.losses, columns, plain=plain))
    return [*lines, *_health(snapshot, width)]


def _label(word: str) -> Text:
    return Text.assemble((f"{word:<{LABEL}}", "dim"))


def _spark(values: Sequence[float | None], columns: int, *, plain: bool) -> Text:
    return Text(sparkline(values, columns, plain=plain), style="cyan")


def _health(snapshot: Snapshot, width: int) -> list[Text]:
    if snapshot.goodput is None and not snapshot.world_size:
        return []
    parts = [] if snapshot.goodput is None else [_label("goodput") + f"{100 * snapshot.goodput:.0f} %"]
    if snapshot.world_size:
        missing = snapshot.ranks_alive < snapshot.world_size
        ranks = Text(f"{snapshot.ranks_alive} of {snapshot.world_size} ranks", style="red" if missing else "")
        parts.append(ranks if parts else _label("running") + ranks)
    if snapshot.restarts:
        lost = f", {snapshot.steps_lost:,} steps lost" if snapshot.steps_lost else ""
        parts.append(Text(f"{snapshot.restarts} restart{'s' * (snapshot.restarts != 1)}{lost}", style="yellow"))
    elif snapshot.world_size:
        parts.append(Text("no restart"))
    if snapshot.checkpoint_age_s is not None:
        parts.append(Text(f"checkpoint {ago(snapshot.checkpoint_age_s)} old (step {snapshot.checkpoint_step:,})"))
    elif snapshot.checkpoint_step == 0:
        parts.append(Text("no checkpoint yet"))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) > width:
            lines.append(_label("") + part)
        else:
            lines[-1] = lines[-1] + "   " + part
    return lines


def _table(rows: Sequence[RankRow], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    bar = min(40, width - 66) if width >= WIDE else 12
    # title, minimum width of the terminal, field whose value is shown, function for the text of a value
    columns: tuple[tuple[str, int, str, Callable[[Any], str | Text]], ...] = (
        ("RANK", 0, "rank", str),
        ("NODE", NARROW, "node", str),
        ("STEP", 0, "step", "{:,}".format),
        ("STEP TIME", 0, "step_s", duration),
        (PHASES, MIDDLE, "phases", lambda phases: _bar(phases, max(bar, 12))),
        ("OWN", WIDE, "own_s", duration),
        ("GPU", WIDE, "device_share", lambda share: f"{100 * share:.0f} %"),
        ("MEMORY", WIDE, "memory_bytes", lambda size: f"{size / (1 << 30):.1f} GiB"),
    )
    shown = [column for column in columns if width >= column[1] and _any(rows, column[2])]
    for title, *_ in shown:
        is_bar = title == PHASES
        table.add_column(title, justify="left" if is_bar else "right", no_wrap=True, min_width=bar if is_bar else None)
    table.add_column("", no_wrap=True, overflow="crop")
    for row in rows:
        values = [(getattr(row, field), text) for *_, field, text in shown]
        cells = ["-" if value is None else text(value) for value, text in values]
        table.add_row(*cells, _mark(row, short=width < MIDDLE))
    return table


def _any(rows: Sequence[RankRow], field: str) -> bool:
    return any(getattr(row, field) not in (None, {}) for row in rows)


def _bar(phases: Mapping[str, float], width: int) -> Text:
    text = Text()
    for phase, size in shares({phase: phases.get(phase, 0.0) for phase in STEP_PHASES}, width).items():
        letter, colour = DRAWN[phase]
        text.append(letter * size, style=colour)
    return text


def _legend(width: int) -> list[Text]:
    labels = {"h2d": "to the device", "comm_exposed": "waiting for others"}
    lines = [Text()]
    for phase in STEP_PHASES:
        part = Text.assemble(DRAWN[phase], (f" {labels.get(phase, phase)}", "dim"))
        if len(lines[-1]) + len(part) > width:
            lines.append(Text())
        lines[-1] = lines[-1] + part + "  "
    return lines


def _mark(row: RankRow, *, short: bool = False) -> Text:
    if row.silent_s is not None:
        return Text(f"no step for {ago(row.silent_s)}"[: 8 if short else None], style="bold red")
    if not row.slow:
        return Text()
    return Text(f"slow: {row.slow:.1f} x{'' if short else ' the others'}", style="bold red")


def line(snapshot: Snapshot) -> str:
    """Return the snapshot as one line, for a log or a pipe."""
    if not snapshot.ranks:
        return f"{snapshot.run}  {snapshot.state}: {one_line(snapshot.message)}"
    parts = [snapshot.run, snapshot.state]
    if snapshot.step is not None:
        parts.append(f"step {snapshot.step}" + (f" of {snapshot.planned}" if snapshot.planned else ""))
    parts += [] if snapshot.samples_per_s is None else [f"{snapshot.samples_per_s:.0f} samples/s"]
    parts += [] if snapshot.loss is None else [f"loss {number(snapshot.loss)}"]
    parts += [] if snapshot.left_s is None else [f"{ago(snapshot.left_s)} left"]
    parts += [f"rank {row.rank} on node {row.node} {_mark(row).plain}" for row in snapshot.ranks if _mark(row).plain]
    return "  ".join([*parts, *map(one_line, snapshot.silent)])


def duration(seconds: float) -> str:
    """Format the duration of a step."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def sparkline(values: Sequence[float | None], width: int, *, plain: bool = False) -> str:
    """Draw the values as a line of at most ``width`` characters, scaled to their range. None becomes a space.

    If there are more values, each character stands for the mean of the known values in one section.
    """
    ramp = PLAIN if plain else BLOCKS
    shown = list(values)
    if len(values) > width:
        cuts = [round(index * len(values) / width) for index in range(width + 1)]
        sections = ([value for value in values[start:end] if value is not None] for start, end in pairwise(cuts))
        shown = [sum(section) / len(section) if section else None for section in sections]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = len(ramp) - 1
    return "".join(" " if value is None else ramp[round((value - low) / (span or 1) * steps)] for value in shown)


def shares(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """Divide ``width`` characters among the parts in proportion (largest remainder method)."""
    whole = sum(parts.values())
    if whole <= 0:
        return {}
    exact = {name: part / whole * width for name, part in parts.items()}
    sizes = {name: int(size) for name, size in exact.items()}
    for name in sorted(exact, key=lambda name: sizes[name] - exact[name])[: width - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def meter(share: float, width: int, *, plain: bool = False) -> str:
    """Draw a bar of ``width`` characters. ``share``, from 0 to 1, is the filled part."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return ("#" if plain else "█") * full + ("." if plain else "░") * (width - full)
