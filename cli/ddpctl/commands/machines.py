"""The subcommands ``hosts`` and ``provision``. They list the machines of a target of kind ssh, and set up new ones."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddpctl import targets
from ddpctl.commands.arguments import DryRun, Json, SshTarget, print_result
from ddpctl.commands.formatting import ago, fit
from ddpctl.commands.launch import File
from ddpctl.errors import ConfigError, NoInputError, UnavailableError, UsageError, writing
from ddpctl.job.launch_plan import Request
from ddpctl.operations.launcher import open_context
from ddpctl.operations.provision import Playbook, inventory_text, set_up
from ddpctl.runs import run_store
from ddpctl.targets import HostReport
from ddpctl.targets.ssh.options import USER
from ddpctl.text import one_line, quote, table

FOLDER = ".provision"  # in the state directory, which also has the runs' folders
MACHINE = "The machine (a host of the target, or another machine)"


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


def provision(
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS...]", help="Arguments for ansible-playbook, such as -- -e gpu_install=true."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only show what would change.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only check whether runs can start there.")] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Remove what ddpctl provision has set up.")] = False,
    login: Annotated[
        str | None,
        typer.Option("--login", metavar="USER", help="The user for the setup [default: the user who trains]."),
    ] = None,
    public_key: Annotated[
        list[Path] | None,
        typer.Option(
            "--public-key", metavar="FILE", help="A key of a user who trains [default: yours]. May be repeated."
        ),
    ] = None,
    controller: Annotated[
        str | None, typer.Option("--controller", metavar="HOST", help=f"{MACHINE} that becomes Slurm's controller.")
    ] = None,
    monitor: Annotated[
        str | None, typer.Option("--monitor", metavar="HOST", help=f"{MACHINE} that runs Prometheus.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="HOST", help=f"{MACHINE} that shares a folder by NFS.")
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option("--inventory", metavar="FILE", help="Your own inventory [default: made from the target]."),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option("--tags", metavar="T,...", help="Only these tags: user, containers, gpu, clock, limits, ..."),
    ] = None,
    target: SshTarget = None,
    file: File = None,
    dry_run: DryRun = False,
) -> None:
    """Set up new machines as nodes, with Ansible playbooks.

    The command checks every machine first. It reports machines that have a problem, and does not change them. It sets
    up the other machines.
    """
    if verify and (check or uninstall):
        raise UsageError("provision: --verify cannot be used with --check or --uninstall")
    _check_login(login)
    playbook: Playbook = "verify" if verify else "uninstall" if uninstall else "site"
    context = open_context()
    folder = context.root / FOLDER
    if inventory is not None and not inventory.is_file():
        raise NoInputError(f"--inventory: {inventory} is {'not a file' if inventory.exists() else 'missing'}")
    if not dry_run:
        with writing(folder, "make the folder"):
            folder.mkdir(parents=True, exist_ok=True)
    if inventory is None:
        settings = ssh_settings("provision", target, file, other=", or an inventory with --inventory")
        machines = {"controller": controller, "monitor": monitor, "storage": storage}
        places = {group: host for group, host in machines.items() if host}
        keys = _keys(settings, public_key, required=playbook == "site" and not dry_run)
        image = None if settings.options.runtime == "none" else settings.job.image
        inventory = folder / f"{settings.target}.yaml"
        try:
            text = inventory_text(settings.options, login=login, keys=keys, image=image, places=places)
        except ValueError as error:  # a flag names an invalid machine
            named = ", ".join(f"--{flag} {host!r}" for flag, host in places.items())
            raise UsageError(f"provision: {named}: {error}") from None
        if dry_run:
            print(f"# {inventory} would contain:\n{text}")
        else:
            with writing(inventory):
                inventory.write_text(text)
            context.emit(f"the inventory of the machines is {inventory}")
    argv = (_ansible(required=not dry_run), f"--inventory={inventory}", *([f"--tags={tags}"] if tags else []))
    recap = str(folder / "recap.json")
    playing = set_up(argv, extra or (), folder=str(_playbooks()), recap=recap, playbook=playbook, check=check)
    try:
        results = context.executor.dry_run(playing, sys.stdout) if dry_run else context.executor.perform(playing)
    except KeyboardInterrupt:
        context.emit("some machines may not be set up completely: run the command again to finish")
        raise
    failed = {host: result["failed"] for host, result in results.items() if result["failed"]}
    for host, reason in failed.items():
        context.emit(f"{host}: {reason}")
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(results)} hosts are not ready: {', '.join(failed)}")


def _check_login(login: str | None) -> None:
    if login is not None and not USER.fullmatch(login):
        raise UsageError(
            f"provision: --login {quote(login)}: expected letters, digits, '_', '.' and '-', not starting with '-'"
        )


def _keys(settings: Request, given: list[Path] | None, *, required: bool) -> tuple[str, ...]:
    """Read the ``given`` public keys, or else those of the hosts, or else those of this user. Raises NoInputError."""
    named = [Path(f"{host.key}.pub").expanduser() for host in settings.options.hosts if host.key]
    paths = given or list(dict.fromkeys(named)) or sorted(Path("~/.ssh").expanduser().glob("id_*.pub"))
    if not paths and required:
        raise NoInputError("there is no public key in ~/.ssh: make one with ssh-keygen, or name one with --public-key")
    try:
        return tuple(path.read_text().strip() for path in paths)
    except OSError as error:
        raise NoInputError(f"cannot read the public key {error.filename}: {error.strerror}") from None


def _ansible(*, required: bool) -> str:
    """Return the path of ansible-playbook. The folder of this Python is searched first.

    Raises UnavailableError if the program is ``required`` but not installed.
    """
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    playbook = shutil.which("ansible-playbook", path=folders)
    if required and not playbook:
        raise UnavailableError("ansible-playbook is not installed: pip install ansible-core")
    return playbook or "ansible-playbook"


def _playbooks() -> Path:
    places = (Path(__file__).parents[3] / "ansible", Path(sys.prefix) / "share" / "ddpctl" / "ansible")
    for place in places:
        if (place / "site.yaml").is_file():
            return place
    raise NoInputError(f"the playbooks are not in {places[1]}: install ddpctl again, or work in a checkout")
