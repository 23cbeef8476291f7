"""The subcommand ``hosts``. It lists the machines and the GPUs of a target of kind ssh."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddpctl import targets
from ddpctl.commands.arguments import Json, SshTarget, print_result
from ddpctl.commands.formatting import ago, fit
from ddpctl.commands.launch import File
from ddpctl.errors import ConfigError
from ddpctl.job.launch_plan import Request
from ddpctl.operations.launcher import open_context
from ddpctl.runs import run_store
from ddpctl.targets import HostReport
from ddpctl.text import one_line, quote, table


def hosts(target: SshTarget = None, file: File = None, as_json: Json = False) -> None:
    """List SSH machines, their GPUs, and the run on each GPU.

    The table shows how long the run has had the GPU, and how busy the GPU is. Below the table are the launches that
    wait for a GPU, in the order of the queue.
    """
    settings = ssh_settings("hosts", target, file)
    context = open_context()
    reports = context.executor.perform(targets.make(settings.kind, settings.options).hosts())
    first_spares = {run.name: run.job.max_nodes for run in run_store.load_all(context.root)}
    print_result([asdict(report) for report in reports], map(fit, hosts_table(reports, first_spares)), as_json=as_json)


def ssh_settings(command: str, target: str | None, file: Path | None, *, other: str = "") -> Request:
    """Load the configuration of a target of kind ssh. Raises ConfigError, whose message ends with ``other``."""
    from ddpctl.job import config

    settings = config.load(file=config.find_file(file, Path.cwd()), target=target, kinds=targets.kinds())
    if "hosts" not in targets.capabilities(settings.kind):
        problem = f"{command}: target '{settings.target}' is of kind {settings.kind}"
        raise ConfigError(f"{problem}: choose a target of kind ssh with --target{other}")
    return settings


def hosts_table(reports: Sequence[HostReport], first_spares: Mapping[str, int]) -> list[str]:
    """Return a line for each GPU and each run on CPUs, then lines for unreachable hosts and waiting launches.

    ``first_spares`` has the number of the first spare of each known run.
    """
    head = ("HOST", "GPU", "RUN", "FOR", "BUSY", "MEMORY", "LOAD", "UUID")
    lines = table([head, *(row for report in reports for row in _rows(report, first_spares))])
    for report in reports:
        if report.failure:
            lines.append(one_line(f"{report.host} does not answer: {report.failure}"))
        if report.waiting:
            waiting = ", ".join(map(quote, report.waiting))
            lines.append(one_line(f"{report.host}: launches that wait for GPUs: {waiting}"))
    return lines


def _rows(report: HostReport, first_spares: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    def name(run: str, node: int | None) -> str:
        return one_line(run) + " (spare)" * (run in first_spares and (node or 0) >= first_spares[run])

    if report.failure:
        return
    host, load = one_line(report.host), "-" if report.load is None else f"{report.load:g} of {report.cores}"
    for index, gpu in enumerate(report.gpus):
        busy = "-" if gpu.busy_percent is None else f"{gpu.busy_percent}%"
        memory = "-"
        if gpu.memory_mib is not None and gpu.total_mib is not None:
            memory = f"{gpu.memory_mib / 1024:.0f} of {gpu.total_mib / 1024:.0f} GiB"
        run = name(gpu.run, gpu.node) if gpu.run else "another program" if gpu.computes else "free"
        lasting = "-" if gpu.since is None else ago(report.time - gpu.since)
        yield (host, str(index), run, lasting, busy, memory, load, one_line(gpu.uuid))
    for cpu in report.cpu_runs:
        yield (host, "none", name(cpu.run, cpu.node), ago(report.time - cpu.since), "-", "-", load, "-")
    if not report.gpus and not report.cpu_runs:
        yield (host, "none", "-", "-", "-", "-", load, "-")
