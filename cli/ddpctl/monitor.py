"""Monitoring in a box: writes its folder, starts and stops its two containers, asks how they fare.

The texts are ``monitoring``'s; Prometheus finds the runs by the files that lie in the folder of targets.
"""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpctl.command import Command, Output, Verb
from ddpctl.desk import Desk
from ddpctl.errors import CannotWriteError, UnavailableError, UsageError
from ddpctl.monitoring import stack
from ddpctl.monitoring.limits import Limits
from ddpctl.monitoring.prometheus import HEAD, Scraping
from ddpctl.prometheus_api import answers
from ddpwire.folder import write_atomic
from ddpwire.regular import read_regular
from ddpwire.targets import TARGETS

READY_S = 120.0
MARK = HEAD.split(".")[0]  # how a file of ours begins
SERVICES = ("prometheus", "grafana")
BY_HAND = "ddpctl monitor config writes the configuration for a Prometheus that you have"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the box is, and where its two servers answer."""

    folder: Path
    prometheus: str
    grafana: str


def folder_of(root: Path) -> Path:
    """The box of this user; no run is called so."""
    return root / ".monitoring"


def targets_of(root: Path) -> Path:
    """Where a launch leaves the addresses of its nodes."""
    return root / TARGETS


def places(root: Path) -> Places | None:
    """Those of the box that was written last; None: there is none."""
    try:
        lines = (folder_of(root) / ".env").read_text().splitlines()
    except OSError:
        return None
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    return _places(root, env["PROMETHEUS_PORT"], env["GRAFANA_PORT"])


def write(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write what was made. A file that somebody else wrote stays, unless ``force``."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name the folder that the configuration is to be written into")
    for name in files:
        path = folder / name
        if not force and path.suffix == ".yml" and path.exists() and not _is_ours(path):
            raise UsageError(f"{path} is not ddpctl's: --force writes over it, or name another folder")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
            path.chmod(0o644)  # the containers' user may be another
        except OSError as error:
            raise CannotWriteError(f"cannot write {path}: {error.strerror}") from None


def _is_ours(path: Path) -> bool:
    try:
        return read_regular(path).startswith(MARK.encode())
    except OSError:
        return False


def up(desk: Desk, box: stack.Box, scraping: Scraping, limits: Limits, *, only: tuple[str, ...] = SERVICES) -> Places:
    """Start it, or make a running one new; returns when it answers."""
    compose = desk.runner.perform(find_compose())
    running = desk.runner.perform(_ask(_line(compose, box.folder, "ps", "-q")))
    found = _places(desk.root, str(box.prometheus_port), str(box.grafana_port))
    if not running.stdout.strip():
        _refuse_taken({"--port": found.prometheus, "--grafana-port": found.grafana})
    for data in ("prometheus", "grafana"):
        _make_folder(box.folder / "data" / data)
    _make_folder(box.targets)
    files = {**stack.compose_files(scraping, limits), **stack.dashboard_files(), ".env": stack.env_file(box)}
    write(box.folder, files, force=True)
    start = _line(compose, box.folder, "up", "-d", "--force-recreate", *only)
    done = desk.runner.perform(_ask(start))
    if done.returncode:
        raise UnavailableError(
            f"{' '.join(start.argv)} failed with {done.returncode}: {_last(done)} ({BY_HAND}; "
            "images of your own: PROMETHEUS_IMAGE and GRAFANA_IMAGE)"
        )
    for service, url in zip(SERVICES, (found.prometheus, found.grafana), strict=True):
        if service in only:
            _wait(service, url, f"{' '.join((*compose, 'logs', service))} in {box.folder}")
    return found


def down(desk: Desk, *, forget: bool) -> bool:
    """Stop and remove the containers; ``forget``: what they kept, too. Whether there was a box."""
    folder = folder_of(desk.root)
    if not (folder / "compose.yaml").exists():
        return False
    compose = desk.runner.perform(find_compose())
    done = desk.runner.perform(_ask(_line(compose, folder, "down", *(["--volumes"] if forget else []))))
    if done.returncode:
        raise UnavailableError(f"{' '.join((*compose, 'down'))} failed with {done.returncode}: {_last(done)}")
    if forget:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def find_compose() -> Verb[tuple[str, ...]]:
    """The compose that is here. Raises UnavailableError."""
    for argv in (("docker", "compose"), ("docker-compose",)):
        (found,) = yield (Command(argv=(*argv, "version"), probe=True, timeout_s=120),)
        if not found.returncode:
            return argv
    raise UnavailableError(f"monitor up needs docker compose, and there is none: install it, or: {BY_HAND}")


def _line(compose: tuple[str, ...], folder: Path, *words: str) -> Command:
    project = f"{stack.PROJECT}-{os.getuid()}"  # each user of a machine has one
    argv = (*compose, "-p", project, "-f", str(folder / "compose.yaml"), *words)
    return Command(argv=argv, cwd=str(folder) if folder.exists() else None, timeout_s=600)


def _ask(command: Command) -> Verb[Output]:
    (output,) = yield (command,)
    return output


def _last(output: Output) -> str:
    lines = [line for line in output.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _places(root: Path, prometheus_port: str, grafana_port: str) -> Places:
    here = "http://127.0.0.1"
    return Places(folder=folder_of(root), prometheus=f"{here}:{prometheus_port}", grafana=f"{here}:{grafana_port}")


def _refuse_taken(urls: Mapping[str, str]) -> None:
    for flag, url in urls.items():
        if answers(url):
            raise UsageError(f"{flag}: something else answers at {url} already: name another port")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWriteError(f"cannot make {path}: {error.strerror}") from None


def _wait(service: str, url: str, look: str) -> None:
    deadline = time.monotonic() + READY_S
    while not answers(url):
        if time.monotonic() > deadline:
            raise UnavailableError(f"{service} does not answer at {url} after {READY_S:g} s: {look} says why")
        time.sleep(0.2)
