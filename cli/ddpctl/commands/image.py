"""``ddpctl image``: build, push, ship and inspect the container image of a job."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ddpctl.commands import launch
from ddpctl.errors import NoInputError, UnavailableError, UsageError
from ddpwire.exits import Exit

if TYPE_CHECKING:
    from ddpctl.command import Host
    from ddpctl.config import Settings
    from ddpctl.launcher import AppContext

app = typer.Typer(
    name="image",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build, push, ship and inspect the container image of a job.",
)
DOCKERFILES = ("Dockerfile", "docker/Dockerfile")

Reference = Annotated[
    str | None, typer.Argument(metavar="[IMAGE]", help="The image [default: the one of ./ddpctl.yaml].")
]
EngineName = Annotated[
    Literal["docker", "podman"], typer.Option("--engine", envvar="DDPCTL_ENGINE", help="Who holds the images.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")]


@app.command()
def build(
    image: Reference = None,
    dockerfile: Annotated[
        Path | None,
        typer.Option("--dockerfile", "-f", help="The Dockerfile [default: ./Dockerfile, else ./docker/Dockerfile]."),
    ] = None,
    context: Annotated[Path, typer.Option("--context", help="The folder that it may copy from.")] = Path(),
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="K=V", help="An ARG of it; may be repeated.")
    ] = None,
    engine: EngineName = "docker",
    dry_run: DryRun = False,
) -> None:
    """Build the image of the project in this folder."""
    from ddpctl import images

    tag = _reference(image)
    found = dockerfile or next((path for name in DOCKERFILES if (path := context / name).is_file()), None)
    if found is None or not found.is_file():
        looked = str(found) if found else " or ".join(str(context / name) for name in DOCKERFILES)
        raise NoInputError(f"no {looked} found: write one (docs/image.md has one of three lines), or name it with -f")
    argv = images.build_line(
        engine, tag=tag, dockerfile=str(found), context=str(context), build_args=tuple(build_arg or ())
    )
    _run(argv, {"DOCKER_BUILDKIT": "1"} if engine == "docker" else {}, dry_run=dry_run)


@app.command()
def push(image: Reference = None, engine: EngineName = "docker", dry_run: DryRun = False) -> None:
    """Push the image to the registry of its name. Log in with the engine's own login."""
    _run((engine, "push", _reference(image)), {}, dry_run=dry_run)


@app.command()
def ship(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST...]", help="[USER@]ADDRESS[:PORT], as ssh knows it [default: the target's]."),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="The image [default: the one of ./ddpctl.yaml].")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", envvar="DDPCTL_TARGET", metavar="T", help="The target of kind ssh whose hosts get it."
        ),
    ] = None,
    file: launch.File = None,
    engine: EngineName = "docker",
    as_json: Annotated[
        bool, typer.Option("--json", help="What each host got, as one JSON document on stdout.")
    ] = False,
) -> None:
    """Copy the image to machines without a registry.

    Layers that a host already has are not sent again. An interrupted transfer continues where it stopped.
    """
    from ddpctl import targets
    from ddpctl.image_transfer import Shipper

    settings = _settings(image, target, file)
    places = [parse_host(text) for text in hosts or ()]
    if not places and "hosts" in targets.capabilities(settings.kind):
        places = [host.host for host in settings.options.hosts]
        engine = engine if settings.options.runtime == "none" else settings.options.runtime
    if not places:
        raise UsageError("image ship: name hosts, or a target of kind ssh with --target")
    context = _context()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpctl" / "images"
    shipper = Shipper(executor=context.executor, emit=context.emit, engine=engine, folder=folder)
    deliveries = shipper.ship(settings.job.image, tuple(dict.fromkeys(places)))
    if as_json:
        print(json.dumps([asdict(one) for one in deliveries], indent=1))
    failed = [one.host for one in deliveries if one.error]
    if failed:
        raise UnavailableError(f"{len(failed)} of {len(deliveries)} hosts did not receive it: {', '.join(failed)}")


@app.command()
def inspect(
    image: Reference = None,
    engine: EngineName = "docker",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show an image's digest, size, layers, and the versions inside."""
    from ddpctl import image_transfer, images
    from ddpctl.command import Command, once

    context = _context()
    found = context.executor.perform(image_transfer.inspect_image(engine, _reference(image)))
    asked = context.executor.perform(once(Command(argv=images.versions_line(engine, found.reference), timeout_s=60)))
    versions = asked.stdout if asked.returncode == Exit.OK else ""
    if as_json:
        pairs = dict(line.split(" ", 1) for line in versions.splitlines())
        print(json.dumps({**asdict(found), "versions": pairs}, indent=1))
        return
    for line in images.show(found, versions):
        print(line)


def parse_host(text: str) -> "Host":
    """Parse a host such as ``alice@box1:2222``. Raises UsageError."""
    from ddpctl.targets.ssh.options import SshHost

    try:
        return SshHost.from_text(text).host
    except ValueError:
        raise UsageError(f"'{text}' is not a host: expected [USER@]ADDRESS[:PORT], such as alice@box1:2222") from None


def _settings(image: str | None, target: str | None = None, file: Path | None = None) -> "Settings":
    """Load the configuration, with ``image`` if given; then a file is not needed. Raises ConfigError."""
    from ddpctl import config, targets

    overrides = {"image": image} if image else {}
    found = None if image and not (target or file) else config.find_file(file, Path.cwd())
    return config.load(file=found, profile=None, target=target, overrides=overrides, kinds=targets.kinds())


def _reference(given: str | None) -> str:
    return _settings(given).job.image


def _context() -> "AppContext":
    from ddpctl.launcher import open_context

    return open_context(os.environ)


def _run(argv: tuple[str, ...], env: dict[str, str], *, dry_run: bool) -> None:
    from ddpctl.command import Command, once

    context = _context()
    verb = once(Command(argv=argv, env=env, mode="stream", timeout_s=None))
    done = context.executor.dry_run(verb, sys.stdout) if dry_run else context.executor.perform(verb)
    if done.returncode:
        raise UnavailableError(f"{argv[0]} {argv[1]} failed with {done.returncode}: see its output above")
