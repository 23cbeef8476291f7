"""How an overview looks: on a terminal of any width as rich's renderable, elsewhere as one line. Pure."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpctl.commands.pictures import meter, shares, sparkline
from ddpctl.commands.show import ago
from ddpctl.watch.overview import Overview, RankRow
from ddpctl.words import one_line
from ddpwire.rank_catalogue import STEP_PHASES

WIDE, MIDDLE, NARROW = 76, 56, 40  # columns of the terminal, from which on there is room for more
COLOURS = {
    "data": "on bright_blue",
    "h2d": "on magenta",
    "forward": "on green",
    "backward": "on cyan",
    "comm_exposed": "on red",
    "optimizer": "on yellow",
    "other": "on bright_black",
}
LETTERS = {
    "data": "d",
    "h2d": "h",
    "forward": "f",
    "backward": "b",
    "comm_exposed": "w",
    "optimizer": "o",
    "other": ".",
}
STATES = {"training": "bold green", "succeeded": "bold green", "failed": "bold red", "lost": "bold red"}
LABEL = 11


def screen(overview: Overview, *, title: str, width: int, height: int | None, plain: bool) -> RenderableType:
    """All of it. ``height``: the lines that there are, None: as many as it takes; ``plain``: ASCII alone."""
    lines = [*_head(overview, title, width), *_numbers(overview, width, plain=plain)]
    lines += [Text(one_line(silent), style="yellow") for silent in overview.silent]
    if not overview.ranks:
        return Group(*(_cut(line, width) if line.plain != one_line(overview.message) else line for line in lines))
    told = width >= MIDDLE and any(row.phases for row in overview.ranks)
    room = None if height is None else max(1, height - len(lines) - 2 - len(_legend(width) * told))
    shown, left_out = _fit(overview.ranks, room)
    table = _table(shown, width)
    below = [Text(f"and {left_out} more ranks, none of them slower", style="dim")] if left_out else []
    legend = _legend(width) if told else []
    return Group(
        *(_cut(line, width) for line in [*lines, Text()]), table, *below, *(_cut(one, width) for one in legend)
    )


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis" if width > NARROW else "crop")
    return line


def _head(overview: Overview, title: str, width: int) -> list[Text]:
    ending = "" if overview.code is None else f", exit code {overview.code}"
    first = Text.assemble(
        (overview.run, "bold"), "  ", (f"{overview.state}{ending}", STATES.get(overview.state, "bold"))
    )
    lines = [Text.assemble(first, (f"  {title}" if width >= MIDDLE else "", "dim"))]
    if overview.state != "training":
        lines.append(Text(one_line(overview.message)))
    return lines


def _numbers(overview: Overview, width: int, *, plain: bool) -> list[Text]:
    lines = []
    if overview.step is not None:
        line = _label("step")
        if overview.planned:
            share = overview.step / overview.planned
            bar = meter(share, 20 if width >= WIDE else 8, plain=plain)
            line.append(f"{overview.step:,} of {overview.planned:,}  {bar} {100 * share:.0f} %")
        else:
            line.append(f"{overview.step:,}")
        if overview.left_s is not None and overview.state == "training":
            line.append(f"  {ago(overview.left_s)} left")
        if overview.epoch is not None:
            line.append(f"  epoch {overview.epoch}")
        lines.append(line)
    room = max(8, min(60, width - LABEL - 26))
    if overview.samples_per_s is not None or any(overview.throughput):
        said = "" if overview.samples_per_s is None else f"{overview.samples_per_s:,.0f} samples/s"
        lines.append(_label("throughput") + Text(f"{said:<22}") + _spark(overview.throughput, room, plain=plain))
    if overview.loss is not None:
        test = "" if overview.accuracy is None else f"  test {100 * overview.accuracy:.1f} %"
        said = f"{number(overview.loss)}{test}"
        lines.append(_label("loss") + Text(f"{said:<22}") + _spark(overview.losses, room, plain=plain))
    return [*lines, *_health(overview, width)]


def _label(word: str) -> Text:
    return Text.assemble((f"{word:<{LABEL}}", "dim"))


def _spark(values: Sequence[float | None], room: int, *, plain: bool) -> Text:
    return Text(sparkline(values, room, plain=plain), style="cyan")


def _health(overview: Overview, width: int) -> list[Text]:
    """In as many lines as it takes."""
    parts = [_label("goodput") + ("-" if overview.goodput is None else f"{100 * overview.goodput:.0f} %")]
    if overview.world_size:
        missing = overview.ranks_alive < overview.world_size
        parts.append(Text(f"{overview.ranks_alive} of {overview.world_size} ranks", style="red" if missing else ""))
    if overview.restarts:
        lost = f", {overview.steps_lost:,} steps lost" if overview.steps_lost else ""
        parts.append(Text(f"{overview.restarts} restart{'s' * (overview.restarts != 1)}{lost}", style="yellow"))
    elif overview.world_size:
        parts.append(Text("no restart"))
    if overview.checkpoint_age_s is not None:
        parts.append(Text(f"checkpoint {ago(overview.checkpoint_age_s)} old (step {overview.checkpoint_step:,})"))
    elif overview.world_size:
        parts.append(Text("no checkpoint yet"))
    if len(parts) == 1 and overview.goodput is None:
        return []
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) > width:
            lines.append(_label("") + part)
        else:
            lines[-1] = lines[-1] + "   " + part
    return lines


def _fit(ranks: Sequence[RankRow], room: int | None) -> tuple[Sequence[RankRow], int]:
    """All ranks, or as many as there is room for, one at the least: the slowest of them."""
    if room is None or len(ranks) <= room:
        return ranks, 0
    room = max(room, 2)
    worst = sorted(ranks, key=lambda row: (row.silent_s or 0.0, row.slow or 0.0, row.own_s or 0.0), reverse=True)
    return sorted(worst[: room - 1], key=lambda row: row.rank), len(ranks) - room + 1


def _table(rows: Sequence[RankRow], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    devices, memory = (any(getattr(row, name) is not None for row in rows) for name in ("device_share", "memory_bytes"))
    table.add_column("RANK", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("NODE", justify="right", no_wrap=True)
    table.add_column("STEP", justify="right", no_wrap=True)
    table.add_column("STEP TIME", justify="right", no_wrap=True)
    bar = min(40, width - 66) if width >= WIDE else 12 if width >= MIDDLE else 0
    if width >= MIDDLE:
        table.add_column("WHERE IT GOES", no_wrap=True, min_width=bar)
    if width >= WIDE:
        table.add_column("OWN", justify="right", no_wrap=True)
        if devices:
            table.add_column("GPU", justify="right", no_wrap=True)
        if memory:
            table.add_column("MEMORY", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    for row in rows:
        cells: list[str | Text] = [str(row.rank)]
        cells += [str(row.node)] if width >= NARROW else []
        cells += ["-" if row.step is None else f"{row.step:,}", duration(row.step_s)]
        if width >= MIDDLE:
            cells.append(_bar(row, max(bar, 12)))
        if width >= WIDE:
            cells.append(duration(row.own_s))
            cells += [_percent(row.device_share)] if devices else []
            cells += [_size(row.memory_bytes)] if memory else []
        table.add_row(*cells, _mark(row, short=width < MIDDLE))
    return table


def _bar(row: RankRow, width: int) -> Text:
    text = Text()
    for phase, size in shares({phase: row.phases.get(phase, 0.0) for phase in STEP_PHASES}, width).items():
        text.append(LETTERS[phase] * size, style=f"black {COLOURS[phase]}")
    return text


def _legend(width: int) -> list[Text]:
    """In as many lines as it takes."""
    words = {"h2d": "to the device", "comm_exposed": "waiting for others"}
    lines = [Text()]
    for phase in STEP_PHASES:
        part = Text.assemble((LETTERS[phase], f"black {COLOURS[phase]}"), (f" {words.get(phase, phase)}", "dim"))
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


def line(overview: Overview) -> str:
    """The overview as one line, for a log or a pipe."""
    if not overview.ranks:
        return f"{overview.run}  {overview.state}: {one_line(overview.message)}"
    parts = [overview.run, overview.state]
    if overview.step is not None:
        parts.append(f"step {overview.step}" + (f" of {overview.planned}" if overview.planned else ""))
    parts += [] if overview.samples_per_s is None else [f"{overview.samples_per_s:.0f} samples/s"]
    parts += [] if overview.loss is None else [f"loss {number(overview.loss)}"]
    parts += [] if overview.left_s is None else [f"{ago(overview.left_s)} left"]
    parts += [f"rank {row.rank} on node {row.node} {_mark(row).plain}" for row in overview.ranks if _mark(row).plain]
    return "  ".join([*parts, *map(one_line, overview.silent)])


def number(value: float) -> str:
    """A loss: four digits that count."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3e}"


def duration(seconds: float | None) -> str:
    """A step's time."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _size(size: float | None) -> str:
    return "-" if size is None else f"{size / (1 << 30):.1f} GiB"
