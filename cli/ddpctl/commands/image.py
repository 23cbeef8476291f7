"""The subcommand ``image``. It builds, pushes, ships and inspects the container image of a job."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ddpctl import targets
from ddpctl.command import Command, Host, once
from ddpctl.commands import launch
from ddpctl.commands.arguments import DryRun, Json, SshTarget, print_result
from ddpctl.errors import NoInputError, UnavailableError, UsageError
from ddpctl.files.images import VERSIONS, Engine, show
from ddpctl.job.launch_plan import Request
from ddpctl.operations.image_transfer import copy_to_hosts, inspect_image
from ddpctl.operations.launcher import open_context
from ddpctl.targets.ssh.options import SshHost
from ddpwire.exits import Exit

app = typer.Typer(
    name="image",
    rich_markup_mode=None,
    add_completion=False,
    help="Build, push, ship and inspect the container image of a job.",
)
DOCKERFILES = ("Dockerfile", "docker/Dockerfile")

Reference = Annotated[
    str | None, typer.Argument(metavar="[IMAGE]", help="The image [default: the image in ./ddpctl.yaml].")
]
EngineName = Annotated[Engine, typer.Option("--engine", envvar="DDPCTL_ENGINE", help="The engine with the image.")]


@app.command()
def build(
    image: Reference = None,
    dockerfile: Annotated[
        Path | None,
        typer.Option("--dockerfile", "-f", help="The Dockerfile [default: Dockerfile or docker/Dockerfile]."),
    ] = None,
    context: Annotated[Path, typer.Option("--context", help="The build context of the image.")] = Path(),
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="K=V", help="A build argument. May be repeated.")
    ] = None,
    engine: EngineName = "docker",
    dry_run: DryRun = False,
) -> None:
    """Build the image of the project in this folder."""
    tag = _settings(image).job.image
    files = [dockerfile] if dockerfile else [context / name for name in DOCKERFILES]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise NoInputError(
            f"no {' or '.join(map(str, files))} found: write one (docs/environment.md has an example of three lines), "
            "or give its path with -f"
        )
    options = [word for pair in build_arg or () for word in ("--build-arg", pair)]
    argv = (engine, "build", "--file", str(file), "--tag", tag, *options, str(context))
    _run(argv, {"DOCKER_BUILDKIT": "1"} if engine == "docker" else {}, dry_run=dry_run)


@app.command()
def push(image: Reference = None, engine: EngineName = "docker", dry_run: DryRun = False) -> None:
    """Push the image to the registry in its name. Log in to the registry first."""
    _run((engine, "push", _settings(image).job.image), {}, dry_run=dry_run)


@app.command()
def ship(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST...]", help="[USER@]ADDRESS[:PORT], as for ssh [default: the target's hosts]."),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="The image [default: the image in ./ddpctl.yaml].")
    ] = None,
    target: SshTarget = None,
    file: launch.File = None,
    engine: EngineName = "docker",
    as_json: Json = False,
) -> None:
    """Copy the image to machines over SSH, without a registry.

    Layers that a host already has are not sent again. If a transfer was interrupted, the next one continues it.
    """
    settings = _settings(image, target, file)
    places = [parse_host(text) for text in hosts or ()]
    if not places and "hosts" in targets.capabilities(settings.kind):
        places = [host.host for host in settings.options.hosts]
        engine = engine if settings.options.runtime == "none" else settings.options.runtime
    if not places:
        raise UsageError("image ship: give the hosts, or choose a target of kind ssh with --target")
    context = open_context()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpctl" / "images"
    deliveries = copy_to_hosts(context, engine, settings.job.image, tuple(dict.fromkeys(places)), folder)
    print_result(deliveries, (), as_json=as_json)
    failed = [delivery["host"] for delivery in deliveries if delivery["error"]]
    if failed:
        raise UnavailableError(f"the image is not on {len(failed)} of {len(deliveries)} hosts: {', '.join(failed)}")


@app.command()
def inspect(image: Reference = None, engine: EngineName = "docker", as_json: Json = False) -> None:
    """Show an image's digest, size, layers and software versions."""
    perform, reference = open_context().executor.perform, _settings(image).job.image
    facts = perform(inspect_image(engine, reference))
    options = ("--rm", "--network", "none", "--entrypoint", "python")
    answer = perform(once(Command(argv=(engine, "run", *options, reference, "-c", VERSIONS), timeout_s=60)))
    versions = answer.stdout if answer.returncode == Exit.OK else ""
    pairs = dict(line.partition(" ")[::2] for line in versions.splitlines())
    print_result({**asdict(facts), "versions": pairs}, show(facts, versions), as_json=as_json)


def parse_host(text: str) -> Host:
    """Parse a host such as ``alice@box1:2222``. Raises UsageError."""
    try:
        return SshHost.from_text(text).host
    except ValueError:
        raise UsageError(f"'{text}' is not a host: expected [USER@]ADDRESS[:PORT], such as alice@box1:2222") from None


def _settings(image: str | None, target: str | None = None, file: Path | None = None) -> Request:
    from ddpctl.job import config

    flags = {"image": image} if image else {}
    path = None if image and not (target or file) else config.find_file(file, Path.cwd())
    return config.load(file=path, target=target, flags=flags, kinds=targets.kinds())


def _run(argv: tuple[str, ...], env: dict[str, str], *, dry_run: bool) -> None:
    context = open_context()
    verb = once(Command(argv=argv, env=env, mode="stream", timeout_s=None))
    done = context.executor.dry_run(verb, sys.stdout) if dry_run else context.executor.perform(verb)
    if done.returncode:
        raise UnavailableError(f"{argv[0]} {argv[1]} failed with {done.returncode}: see its output above")
