"""The verbs around it: init, schema, version."""

import json
import os
from pathlib import Path
from platform import python_version
from typing import Annotated

import typer

from ddpctl.errors import CannotWriteError, UsageError
from ddpwire.version import __version__


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("ddpctl.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented ddpctl.yaml that fits this machine."""
    from ddpctl import starter
    from ddpctl.desk import open_desk
    from ddpctl.targets import local

    desk = open_desk(os.environ)
    gpus = desk.runner.perform(local.find_gpus())
    text = starter.text(gpus=len(gpus), cores=os.cpu_count() or 1)
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already: --force writes over it, or name another file") from None
    except OSError as error:
        raise CannotWriteError(f"cannot write {path}: {error.strerror}") from None
    desk.say(f"wrote {path}: ddpctl launch runs it, ddpctl launch --dry-run shows what would run")


def schema() -> None:
    """Print the JSON schema of ddpctl.yaml, for an editor."""
    from ddpctl import config, targets

    print(json.dumps(config.schema(targets.kinds()), indent=1))


def version() -> None:
    """Print the versions that matter."""
    from importlib import metadata

    print(f"ddpctl {__version__}")
    print(f"python {python_version()}")
    for package in ("torch", "torchvision"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed (ranks need it: pip install 'ddpctl[train]')")


def print_version(asked: bool) -> None:
    """What ``ddpctl --version`` does."""
    if asked:
        version()
        raise typer.Exit


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(init)
    app.command()(schema)
    app.command()(version)
