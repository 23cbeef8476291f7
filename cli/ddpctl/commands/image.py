"""``ddpctl image``: ship and inspect the container image of a job."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ddpctl.commands import launch
from ddpctl.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from ddpctl.command import Host
    from ddpctl.config import Settings
    from ddpctl.launcher import AppContext

app = typer.Typer(
    name="image",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Ship and inspect the container image of a job.",
)

Reference = Annotated[
    str | None, typer.Argument(metavar="[IMAGE]", help="The image [default: the one of ./ddpctl.yaml].")
]
EngineName = Annotated[
    Literal["docker", "podman"], typer.Option("--engine", envvar="DDPCTL_ENGINE", help="Who holds the images.")
]


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
    """Bring the image to machines without a registry.

    Layers that a host has are not sent again, and a ship that was cut off resumes where it stopped.
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

    context = _context()
    found = context.executor.perform(image_transfer.inspect_image(engine, _reference(image)))
    versions = context.executor.perform(images.versions(engine, found.reference))
    if as_json:
        pairs = dict(line.split(" ", 1) for line in versions.splitlines())
        print(json.dumps({**asdict(found), "versions": pairs}, indent=1))
        return
    for line in images.show(found, versions):
        print(line)


def parse_host(text: str) -> "Host":
    """``alice@box1:2222``. Raises UsageError."""
    from ddpctl.targets.ssh.options import SshHost

    try:
        return SshHost.from_text(text).host
    except ValueError:
        raise UsageError(f"'{text}' is not a host: [USER@]ADDRESS[:PORT], such as alice@box1 or box1:2222") from None


def _settings(image: str | None, target: str | None = None, file: Path | None = None) -> "Settings":
    """The configuration here, with the image that was named. Raises ConfigError."""
    from ddpctl import config, targets

    overrides = {"image": image} if image else {}
    found = None if image and not (target or file) else config.find_file(file, Path.cwd())
    return config.load(file=found, profile=None, target=target, overrides=overrides, kinds=targets.kinds())


def _reference(given: str | None) -> str:
    """The image that was named, or that of the configuration here. Raises ConfigError."""
    return _settings(given).job.image


def _context() -> "AppContext":
    from ddpctl.launcher import open_context

    return open_context(os.environ)
