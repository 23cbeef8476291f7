"""The subcommand ``provision``. It sets up new machines as nodes of a target of kind ssh or of a Slurm cluster."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands import launch
from ddpctl.commands.arguments import DryRun, SshTarget
from ddpctl.commands.hosts import ssh_settings
from ddpctl.errors import NoInputError, UnavailableError, UsageError, writing
from ddpctl.job.launch_plan import Request
from ddpctl.operations.launcher import open_context
from ddpctl.targets.ssh.options import USER
from ddpctl.text import quote

if TYPE_CHECKING:
    from ddpctl.operations.provision import Playbook

FOLDER = ".provision"  # in the state directory, which also has the runs' folders
MACHINE = "The machine (a host of the target, or another machine)"


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
    file: launch.File = None,
    dry_run: DryRun = False,
) -> None:
    """Set up new machines as nodes, with Ansible playbooks.

    The command checks every machine first. It reports machines that have a problem, and does not change them. It sets
    up the other machines.
    """
    from ddpctl.operations import provision as provisioning

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
            text = provisioning.inventory_text(settings.options, login=login, keys=keys, image=image, places=places)
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
    playing = provisioning.provision(
        argv, extra or (), folder=str(_playbooks()), recap=recap, playbook=playbook, check=check
    )
    try:
        results = context.executor.dry_run(playing, sys.stdout) if dry_run else context.executor.perform(playing)
    except KeyboardInterrupt:
        context.emit("some machines may not be set up completely: run the command again to finish")
        raise
    failed = {host: result["failed"] for host, result in results.items() if result["failed"]}
    for host, why in failed.items():
        context.emit(f"{host}: {why}")
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
