"""``ddpctl provision``: turn bare machines into nodes of a target of kind ssh, or of a Slurm cluster."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands import launch
from ddpctl.errors import ConfigError, NoInputError, UnavailableError, UsageError, writing
from ddpctl.text import quote

if TYPE_CHECKING:
    from ddpctl.config import Settings
    from ddpctl.provision import Playbook

FOLDER = ".provision"  # beside the runs, in the same state directory

Check = Annotated[bool, typer.Option("--check", help="Only show what would change; change nothing.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Only check whether runs would start: one sentence per machine.")
]
Uninstall = Annotated[bool, typer.Option("--uninstall", help="Remove what provision has set up.")]
Login = Annotated[
    str | None,
    typer.Option("--login", metavar="USER", help="The user who logs in to set them up [default: the user who trains]."),
]
PublicKey = Annotated[
    list[Path] | None,
    typer.Option(
        "--public-key", metavar="FILE", help="A key of a user who may train; may be repeated [default: yours]."
    ),
]
Place = "The machine, one of the hosts or another,"
Controller = Annotated[
    str | None, typer.Option("--controller", metavar="HOST", help=f"{Place} that gets Slurm's controller.")
]
Monitor = Annotated[str | None, typer.Option("--monitor", metavar="HOST", help=f"{Place} that gets Prometheus.")]
Storage = Annotated[str | None, typer.Option("--storage", metavar="HOST", help=f"{Place} that shares a folder by NFS.")]
Inventory = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        metavar="FILE",
        help="An inventory of your own; without it one is written to the state directory's .provision, by target.",
    ),
]
Tags = Annotated[
    str | None, typer.Option("--tags", metavar="T,...", help="Only these: user, containers, gpu, clock, limits, ...")
]
Target = Annotated[
    str | None, typer.Option("--target", "-t", envvar="DDPCTL_TARGET", metavar="T", help="The target of kind ssh.")
]
Extra = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGS...]", help="Arguments for ansible-playbook, such as -- -e gpu_install=true."),
]


def provision(
    extra: Extra = None,
    check: Check = False,
    verify: Verify = False,
    uninstall: Uninstall = False,
    login: Login = None,
    public_key: PublicKey = None,
    controller: Controller = None,
    monitor: Monitor = None,
    storage: Storage = None,
    inventory: Inventory = None,
    tags: Tags = None,
    target: Target = None,
    file: launch.File = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
) -> None:
    """Set up bare machines as nodes, with the playbooks in ansible/.

    Every machine is checked first. Machines with a problem are reported and left unchanged; the others are set up.
    """
    from ddpctl import provision as provisioning
    from ddpctl.launcher import open_context

    if verify and (check or uninstall):
        raise UsageError("provision: --verify cannot be used with --check or --uninstall")
    _check_login(login)
    playbook: Playbook = "verify" if verify else "uninstall" if uninstall else "site"
    context = open_context(os.environ)
    folder = context.root / FOLDER
    if inventory is not None and not inventory.is_file():
        raise NoInputError(f"--inventory: {inventory} is {'not a file' if inventory.exists() else 'missing'}")
    if not dry_run:
        with writing(folder, "make the folder"):
            folder.mkdir(parents=True, exist_ok=True)
    if inventory is None:
        settings = _settings(target, file)
        places = {"controller": controller, "monitor": monitor, "storage": storage}
        site = provisioning.Site(
            login=login,
            keys=_keys(settings, public_key, asked=playbook == "site" and not dry_run),
            image=None if settings.options.runtime == "none" else settings.job.image,
            places={group: host for group, host in places.items() if host},
        )
        inventory = folder / f"{settings.target}.yaml"
        try:
            text = provisioning.inventory_text(settings.options, site)
        except ValueError as error:  # a flag named a machine that is not valid
            named = ", ".join(f"--{flag} {host!r}" for flag, host in site.places.items())
            raise UsageError(f"provision: {named}: {error}") from None
        if dry_run:
            print(f"# {inventory} would contain:\n{text}")
        else:
            with writing(inventory):
                inventory.write_text(text)
            context.emit(f"the machines are those of {inventory}")
    options = provisioning.PlaybookRun(
        ansible=_ansible(asked=not dry_run),
        folder=str(_playbooks()),
        inventory=str(inventory),
        recap=str(folder / "recap.json"),
        playbook=playbook,
        check=check,
        tags=tuple(tags.split(",")) if tags else (),
        extra=tuple(extra or ()),
    )
    verb = provisioning.provision(options)
    try:
        fared = context.executor.dry_run(verb, sys.stdout) if dry_run else context.executor.perform(verb)
    except KeyboardInterrupt:
        context.emit("a machine may be half set up: run the command again to finish it")
        raise
    failed = {host: one.failed for host, one in fared.items() if one.failed}
    for host, why in failed.items():
        context.emit(f"{host}: {why}")
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(fared)} hosts are not ready: {', '.join(failed)}")


def _check_login(login: str | None) -> None:
    from ddpctl.targets.ssh.options import check_user

    try:
        if login is not None:
            check_user(login)
    except ValueError:
        raise UsageError(
            f"provision: --login {quote(login)}: expected letters, digits, '_', '.' and '-', not starting with '-'"
        ) from None


def _settings(target: str | None, file: Path | None) -> "Settings":
    from ddpctl import config, targets

    settings = config.load(file=config.find_file(file, Path.cwd()), target=target, kinds=targets.kinds())
    if "hosts" not in targets.capabilities(settings.kind):
        raise ConfigError(
            f"provision: target '{settings.target}' is of kind {settings.kind}: name one of kind ssh with --target, "
            "or an inventory with --inventory"
        )
    return settings


def _keys(settings: "Settings", given: list[Path] | None, *, asked: bool) -> tuple[str, ...]:
    """Return the public keys of the users who may train: the given ones, else those of the hosts, else this user's.

    Raises NoInputError if a key cannot be read, or if there is none and ``asked`` is true.
    """
    named = [Path(f"{host.key}.pub").expanduser() for host in settings.options.hosts if host.key]
    paths = given or list(dict.fromkeys(named)) or sorted(Path("~/.ssh").expanduser().glob("id_*.pub"))
    if not paths and asked:
        raise NoInputError("there is no public key in ~/.ssh: make one with ssh-keygen, or name one with --public-key")
    try:
        return tuple(path.read_text().strip() for path in paths)
    except OSError as error:
        raise NoInputError(f"cannot read the public key {error.filename}: {error.strerror}") from None


def _ansible(*, asked: bool) -> str:
    """Find ansible-playbook, first beside this Python. Raises UnavailableError if ``asked`` and it is not found."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if found := shutil.which("ansible-playbook", path=places):
        return found
    if not asked:
        return "ansible-playbook"
    raise UnavailableError(
        "ansible-playbook is not installed: install it with pip install 'ddpctl[provision]', in a clone with "
        "pip install -e '.[provision]'"
    )


def _playbooks() -> Path:
    places = (Path(__file__).parents[3] / "ansible", Path(sys.prefix) / "share" / "ddpctl" / "ansible")
    for place in places:
        if (place / "site.yaml").is_file():
            return place
    raise NoInputError(f"the playbooks are not in {places[1]}: install ddpctl again, or work in a checkout")
