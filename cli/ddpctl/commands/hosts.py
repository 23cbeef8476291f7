"""``ddpctl hosts``: lists a target's machines, their GPUs, which run has each GPU, and which launches wait."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.arguments import Json
from ddpctl.commands.launch import File
from ddpctl.errors import ConfigError
from ddpctl.text import one_line, table

if TYPE_CHECKING:
    from ddpctl.targets import HostReport


def hosts(
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", metavar="T", help="A target of the file with machines [default: the file's]."),
    ] = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """List SSH machines, their GPUs, and which run has each GPU.

    Shows for how long a run has a GPU, how busy the GPU is, and the launches that wait, in their order.
    """
    from ddpctl import config, launcher, targets
    from ddpctl.commands.formatting import fit

    settings = config.load(file=config.find_file(file, Path.cwd()), target=target, kinds=targets.kinds())
    if "hosts" not in targets.capabilities(settings.kind):
        raise ConfigError(
            f"hosts: target '{settings.target}' is of kind {settings.kind}: name one of kind ssh with --target"
        )
    context = launcher.open_context(os.environ)
    found = context.executor.perform(targets.make(settings.kind, settings.options).hosts())
    if as_json:
        print(json.dumps([asdict(report) for report in found], indent=1))
        return
    for line in hosts_table(found):
        print(fit(line))


def hosts_table(found: "Sequence[HostReport]") -> list[str]:
    """Return one line per GPU and per run of CPU ranks, then the hosts that do not answer and the waiting launches."""
    head = ("HOST", "GPU", "RUN", "FOR", "BUSY", "MEMORY", "LOAD", "UUID")
    lines = table([head, *(row for report in found for row in _rows(report))])
    for report in found:
        if report.failure:
            lines.append(one_line(f"{report.host} does not answer: {report.failure}"))
        if report.waiting:
            lines.append(one_line(f"{report.host}: waiting launches: {', '.join(report.waiting)}"))
    return lines


def _rows(report: "HostReport") -> Iterator[tuple[str, ...]]:
    from ddpctl.commands.formatting import ago

    host, load = one_line(report.host), "-" if report.load is None else f"{report.load:g} of {report.cores}"
    if report.failure:
        return
    for place, gpu in enumerate(report.gpus):
        busy = "-" if gpu.busy_percent is None else f"{gpu.busy_percent}%"
        memory = "-"
        if gpu.memory_mib is not None and gpu.total_mib is not None:
            memory = f"{gpu.memory_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB"
        run = one_line(gpu.run) if gpu.run else "another program" if gpu.computes else "free"
        lasting = "-" if gpu.since is None else ago(report.time - gpu.since)
        yield (host, str(place), run, lasting, busy, memory, load, one_line(gpu.uuid))
    for cpu in report.cpu_runs:
        yield (host, "none", one_line(cpu.run), ago(report.time - cpu.since), "-", "-", load, "-")
    if not report.gpus and not report.cpu_runs:
        yield (host, "none", "-", "-", "-", "-", load, "-")
