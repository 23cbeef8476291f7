"""Starts and stops Prometheus and Grafana with docker compose, and writes their files.

compose.yaml is the same on all machines. The values that differ between machines are in the file ``.env``, which docker
compose reads. For Grafana on a Kubernetes cluster, this module creates a ConfigMap for each dashboard.
"""

import os
import shutil
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddpctl.command import NOT_FOUND, Command, Verb, once
from ddpctl.errors import UnavailableError, UsageError, writing
from ddpctl.monitoring.prometheus import Limits, Scraping, is_reachable, prometheus_yml, rule_groups, static_file
from ddpctl.operations.launcher import AppContext
from ddpwire.run_files import read_regular, write_atomic

FOLDER = ".monitoring"  # for the files and the data, in the folder of the runs; no run can have this name
PROJECT = "ddpctl-monitor"
MOUNTED_TARGETS = "/targets"  # the path of the targets' folder in the containers
DASHBOARDS = ("run", "fleet")
COMPOSE_FILES = ("compose.yaml", "provisioning/datasources/prometheus.yaml", "provisioning/dashboards/ddpctl.yaml")
READY_S = 120.0
MARK = b"Made by ddpctl"  # every file of ``ddpctl monitor config`` contains this
SERVICES = ("prometheus", "grafana")
BY_HAND = "write the configuration for your own Prometheus with ddpctl monitor config"


def config_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """Return the configuration of Prometheus and the dashboards, keyed by path."""
    return {
        "prometheus.yml": prometheus_yml(scraping),
        "rules.yaml": rule_groups(limits),
        **{f"dashboards/{name}.json": static_file(f"{name}.json") for name in DASHBOARDS},
    }


def compose_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """Return all files except ``.env``, keyed by path. docker/monitoring has the same files without the dashboards."""
    files = config_files(replace(scraping, targets=MOUNTED_TARGETS), limits)
    return {**files, **{name: static_file(name) for name in COMPOSE_FILES}}


def urls_of(root: Path) -> dict[str, str]:
    """Return the URL of each service, with the ports from ``.env``. Return no URLs if there is no such file."""
    try:
        lines = (root / FOLDER / ".env").read_text().splitlines()
    except OSError:
        return {}
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    return _urls(env["PROMETHEUS_PORT"], env["GRAFANA_PORT"])


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write the files.

    Raises UsageError if ``force`` is false and one of the files exists but was not written by ddpctl. Also raises it if
    ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give the folder to write the configuration to")
    for name in files:
        path = folder / name
        if not force and path.exists() and not _is_ours(path):
            raise UsageError(f"{path} was not written by ddpctl: overwrite it with --force, or give another folder")
    for name, text in files.items():
        path = folder / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
            path.chmod(0o644)  # the containers may run as another user


def _is_ours(path: Path) -> bool:
    try:
        return MARK in read_regular(path)
    except OSError:
        return False


def up(
    context: AppContext,
    scraping: Scraping,
    limits: Limits,
    *,
    ports: tuple[int, int],
    retention: str,
    only: tuple[str, ...] = SERVICES,
) -> dict[str, str]:
    """Start the containers, or create them again if they are running, and wait until the servers answer.

    ``ports``: the ports of Prometheus and Grafana. Return the URL of each service.
    """
    folder, urls = context.root / FOLDER, _urls(*ports)
    compose = context.executor.perform(find_compose())
    running = context.executor.perform(once(_line(compose, folder, "ps", "-q")))
    if not running.stdout.strip():
        for flag, url in zip(("--port", "--grafana-port"), urls.values(), strict=True):
            if is_reachable(url):
                raise UsageError(f"{flag}: another program answers at {url}: choose another port")
    data = {"PROMETHEUS_DATA": folder / "data" / "prometheus", "GRAFANA_DATA": folder / "data" / "grafana"}
    for path in (*data.values(), Path(scraping.targets)):
        with writing(path, "make"):
            path.mkdir(parents=True, exist_ok=True)
    env = {
        "TARGETS": scraping.targets,
        "OWNER": f"{os.getuid()}:{os.getgid()}",  # the containers run as this user, who owns the data folders
        "PROMETHEUS_PORT": ports[0],
        "GRAFANA_PORT": ports[1],
        "RETENTION": retention,
        "DASHBOARDS": folder / "dashboards",
        **data,
    }
    env_file = "".join(f"{name}={value}\n" for name, value in env.items())
    write_files(folder, {**compose_files(scraping, limits), ".env": env_file}, force=True)
    todo = f" ({BY_HAND}, or set PROMETHEUS_IMAGE and GRAFANA_IMAGE to your own images)"
    _run(context, _line(compose, folder, "up", "-d", "--force-recreate", *only), todo)
    deadline = time.monotonic() + READY_S
    for service in only:
        while not is_reachable(urls[service]):
            if time.monotonic() > deadline:
                late = f"{service} does not answer at {urls[service]} after {READY_S:g} s"
                raise UnavailableError(
                    f"{late}; for the cause, run {' '.join((*compose, 'logs', service))} in {folder}"
                )
            time.sleep(0.2)
    return urls


def down(context: AppContext, *, forget: bool) -> bool:
    """Remove the containers. If ``forget``, also delete their data. Return False if there is nothing to remove."""
    folder = context.root / FOLDER
    if not (folder / "compose.yaml").exists():
        return False
    compose = context.executor.perform(find_compose())
    _run(context, _line(compose, folder, "down", *(["--volumes"] if forget else [])))
    if forget:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def find_compose() -> Verb[tuple[str, ...]]:
    """Return the compose command of this machine.

    Raises UnavailableError if docker compose is not installed, or if the Docker daemon does not answer.
    """
    for argv in (("docker", "compose"), ("docker-compose",)):
        (version,) = yield (Command(argv=(*argv, "version"), probe=True, timeout_s=120),)
        if not version.returncode:
            break
    else:
        raise UnavailableError(f"monitor up needs docker compose, which is not installed: install it, or {BY_HAND}")
    (daemon,) = yield (Command(argv=("docker", "version"), probe=True, timeout_s=60),)
    if daemon.returncode not in (0, NOT_FOUND):  # docker-compose does not need the docker command
        why = daemon.last_line("no message")
        raise UnavailableError(f"docker compose needs the Docker daemon, which does not answer ({why}): start it")
    return argv


def _line(compose: tuple[str, ...], folder: Path, *args: str) -> Command:
    project = f"{PROJECT}-{os.getuid()}"  # each user of a machine needs a separate project
    argv = (*compose, "-p", project, "-f", str(folder / "compose.yaml"), *args)
    return Command(argv=argv, cwd=str(folder) if folder.exists() else None, timeout_s=600)


def _run(context: AppContext, command: Command, todo: str = "") -> None:
    output = context.executor.perform(once(command))
    if output.returncode:
        reason = f"failed with {output.returncode}: {output.last_line('no message')}"
        raise UnavailableError(f"{' '.join(command.argv)} {reason}{todo}")


def _urls(*ports: object) -> dict[str, str]:
    return {service: f"http://127.0.0.1:{port}" for service, port in zip(SERVICES, ports, strict=True)}


def dashboard_config_maps() -> str:
    """Return a ConfigMap for each dashboard, with the label that Grafana's sidecar searches for by default."""
    return "---\n".join(
        f"""\
# Made by ddpctl monitor. Apply it in the namespace that Grafana's sidecar watches.
apiVersion: v1
kind: ConfigMap
metadata:
  name: ddpctl-dashboard-{name}
  labels:
    grafana_dashboard: '1'
data:
  ddpctl-{name}.json: |
{textwrap.indent(static_file(f"{name}.json"), "    ")}"""
        for name in DASHBOARDS
    )
