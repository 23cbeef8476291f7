"""The subcommands ``init``, ``schema`` and ``version``, which need no run."""

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from platform import python_version
from typing import Annotated

import typer

from ddpctl.errors import CannotWriteError, UnavailableError, UsageError, writing
from ddpctl.operations.launcher import open_context
from ddpctl.text import counted, cut, table
from ddpwire.version import __version__

FROM = "Translate this file: an sbatch script, PyTorchJob, TrainJob, hostfile, accelerate or docker-compose file."


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("ddpctl.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    source: Annotated[Path | None, typer.Option("--from", metavar="FILE", help=FROM)] = None,
) -> None:
    """Write a commented ddpctl.yaml that fits this machine. With --from, it says what each setting of FILE became."""
    from ddpctl import targets
    from ddpctl.job.config import load
    from ddpctl.job.schema import starter_text
    from ddpctl.targets import local

    context = open_context()
    if not force and os.path.lexists(path):
        raise UsageError(f"{path} already exists: overwrite it with --force, or choose another name")
    if path.exists() and not path.is_file():  # opening a FIFO would wait for a reader
        raise CannotWriteError(f"cannot write {path}: it is not a regular file")
    if source:
        from ddpctl.migration.formats import migrate

        migration = migrate(source, targets.kinds())
        text = migration.text(str(source))
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
        rows = [("LINE", "SETTING", "BECAME"), *migration.rows()]
        lines = table([(line, cut(setting, columns // 2, plain=True), became) for line, setting, became in rows])
        for line in lines:
            print(textwrap.fill(line, columns, subsequent_indent=" " * lines[0].index("BECAME")))
    else:
        try:
            gpus = context.executor.perform(local.find_gpus())
        except UnavailableError as error:
            context.emit(f"{error}; the file is written for CPU ranks")
            gpus = ()
        text = starter_text(gpus=len(gpus), cores=os.cpu_count() or 1)
    with writing(path), path.open("w" if force else "x") as file:
        file.write(text)
    if source:
        load(file=path, kinds=targets.kinds())
        if "job.command" not in migration.values:
            context.emit(f"wrote {path}: no launch, because {source} names no script: write it as command, or after --")
            return
    hint = "to run the job in it, use ddpctl launch; to see only what would run, use ddpctl launch --dry-run"
    if source and (number := migration.count_unknown()):
        hint = f"first write its {counted(number, 'unknown value')}, which its comments name; then {hint}"
    context.emit(f"wrote {path}: {hint}")


def schema() -> None:
    """Print the JSON schema of ddpctl.yaml, for use in an editor."""
    from ddpctl import targets
    from ddpctl.job.schema import json_schema

    print(json.dumps(json_schema(targets.kinds()), indent=1))


def version() -> None:
    """Print the versions of ddpctl, Python and torch."""
    from importlib import metadata

    print(f"ddpctl {__version__}")
    print(f"python {python_version()}")
    for package in ("torch", "torchvision"):
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} not installed (ranks need it: pip install {package})")
