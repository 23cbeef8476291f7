"""Facts about this node: those that must be the same on all nodes, and the inventory in environment.json.

All nodes must have the same builds, script and configuration. The inventory describes the machine and the builds for
people who study the run later. It contains no environment variables. CUDA is not initialised here, because ranks that
are forked later could not use it.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ddprun.settings.node_config import RUN_PATH, NodeConfig
from ddprun.system import machine
from ddpwire import names
from ddpwire.machine import GIB, usable_cores
from ddpwire.run_files import ENVIRONMENT, PYTHON_RECORD, write_atomic
from ddpwire.version import __version__

NONE = "none"


def read_facts(config: NodeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the facts to compare between nodes, keyed by name. The driver is "none" for CPU ranks."""
    import torch

    nccl = NONE
    with contextlib.suppress(Exception):  # a CUDA build without NCCL may raise any error
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else NONE  # type: ignore[no-untyped-call]
    return {
        "--check-only": "given" if config.check_only else "not given",
        "torch": str(torch.__version__),
        "NCCL": nccl,
        "driver": (environ.get(names.DEVICE) != "cpu" and machine.driver_version()) or NONE,
        "python": platform.python_version(),
        "image": environ.get(names.IMAGE) or NONE,
        "environment": _environment() or NONE,
    } | {f"sha256 of {path.name}": _sha256(path) for path in _compared_files(config.command)}


def _environment() -> str:
    """Return the lock of the environment that ddpctl launch has made for this Python, or ''."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(Path(sys.prefix, PYTHON_RECORD).read_text())
        return f"{record['lock']}, packages {record['packages']}"
    return ""


def _packages() -> str:
    """Return the installed packages with their versions, from the names of their folders: this reads no file."""
    folders = (folder.stem for place in reversed(sys.path) for folder in Path(place).glob("*.dist-info"))
    versions = {
        name.replace("_", "-").lower(): version for name, _, version in (stem.partition("-") for stem in folders)
    }
    return " ".join(f"{name}=={version}" for name, version in sorted(versions.items()))


def differences(mine: Mapping[str, str], node_0: Mapping[str, str], node: int) -> str:
    """Describe each fact that differs between ``node`` and node 0, with both values. Return '' if none differs."""
    texts = []
    for fact in dict.fromkeys((*node_0, *mine)):
        values = [facts.get(fact, NONE) for facts in (mine, node_0)]
        # Drivers of the same release, such as 570.86.15 and 570.124.6, may differ.
        if len({value.partition(".")[0] if fact == "driver" else value for value in values}) > 1:
            texts.append(f"{fact} is {values[0]} on node {node}, but {values[1]} on node 0")
    return "; ".join(texts)


def driver_difference(mine: Mapping[str, str], node_0: Mapping[str, str], node: int) -> str:
    """Return a warning with both driver versions if they differ, or an empty string."""
    own, other = mine.get("driver", NONE), node_0.get("driver", NONE)
    return f"the driver is {own} on node {node}, but {other} on node 0" if own != other else ""


def argument_hashes(command: tuple[str, ...]) -> list[str]:
    """Return a hash of each argument of the script, because the argument itself may contain a secret."""
    arguments = (word.encode(errors="surrogateescape") for word in _script_arguments(command))
    return [hashlib.sha256(word).hexdigest()[:12] for word in arguments]


def differing_argument(command: tuple[str, ...], node_0: Sequence[str], node: int) -> str:
    """Return a warning about the first script argument that differs from node 0's, or an empty string.

    The warning does not contain the argument's value. Arguments that place a node or a rank may differ.
    """
    arguments = _script_arguments(command)
    if len(arguments) != len(node_0):
        number = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        return f"the script has {number} on node {node}, but {len(node_0)} on node 0"
    for index, (mine, first) in enumerate(zip(argument_hashes(command), node_0, strict=True)):
        name = _argument_name(arguments, index)
        if mine != first and not _is_placement(name):
            return f"{name or f'argument {index + 1}'} of the script is not the same on node {node} as on node 0"
    return ""


def _argument_name(arguments: Sequence[str], index: int) -> str:
    before = arguments[index - 1] if index and arguments[index - 1].startswith("-") else ""
    return arguments[index].partition("=")[0] if arguments[index].startswith("-") else before


def _is_placement(name: str) -> bool:
    return any(word in name.lower() for word in ("rank", "node", "host", "addr", "local", "device"))


def config_sha256(command: tuple[str, ...]) -> str:
    """Return a hash of the script, its configuration files, and its arguments except those that may differ."""
    arguments = _script_arguments(command)
    module = "".join(command[2:3]) if command[1:2] == ("-m",) else ""
    digest = hashlib.sha256(module.encode())
    for path in _compared_files(command):
        digest.update(f"{path.name} {_sha256(path)}\n".encode(errors="surrogateescape"))
    for index, word in enumerate(arguments):
        if not _is_placement(_argument_name(arguments, index)):
            digest.update(word.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()[:12]


def image_digest(image: str) -> str:
    """Return the digest in an image's name (``name@sha256:...``), or else the name. Return "none" for no image."""
    return image.rpartition("@")[2] or NONE


def _script_arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    rest = command[1:] if Path(command[0]).name.startswith("python") else command
    return rest[2:] if rest[:1] == ("-m",) else rest[1:]


def _script(command: tuple[str, ...]) -> str:
    """Return the script or ``-m module``, without its arguments, which may contain a secret."""
    rest = command[1:] if Path(command[0]).name.startswith("python") else command
    rest = rest[2:] if rest[:2] == RUN_PATH else rest
    return " ".join(rest[: 2 if rest[:1] == ("-m",) else 1])


def summarize_builds(facts: Mapping[str, str]) -> str:
    """Return the builds and their versions in one line."""
    builds = ("torch", "NCCL", "driver", "python", "image")
    return ", ".join(f"{build} {facts[build]}" for build in builds if facts[build] != NONE)


def _compared_files(command: tuple[str, ...]) -> list[Path]:
    """Return the files to compare between nodes: the script, and the files given in options such as --config."""
    _, *arguments = command if Path(command[0]).name.startswith("python") else ("", *command)
    tokens = [word for argument in arguments for word in argument.split("=", 1)]
    configurations = [value for flag, value in pairwise(tokens) if flag.startswith("-") and "conf" in flag]
    paths = []
    for path in map(Path, [*tokens[:1], *configurations]):
        with contextlib.suppress(OSError, ValueError):  # an argument may be no path
            paths += [path] if path.is_file() and path.stat().st_size <= 1 << 24 else []
    return paths


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return f"not readable ({error.strerror})"


def write_inventory(node_dir: Path, config: NodeConfig, environ: Mapping[str, str]) -> None:
    """Write environment.json. A full disk does not stop the training."""
    text = json.dumps(inventory(config, environ), indent=1) + "\n"
    with contextlib.suppress(OSError):
        write_atomic(node_dir / ENVIRONMENT, text.encode(errors="replace"))


def inventory(config: NodeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the known facts about the machine and the builds, keyed by name."""
    cores, usable = os.cpu_count() or 1, usable_cores()
    system, cpu = platform.system(), platform.processor()
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release().get("PRETTY_NAME", system)
    with contextlib.suppress(OSError, LookupError):  # the text after "model name : " of the first core
        cpu = " ".join(Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].partition("\n")[0].split())
    machine_facts = {
        "host": socket.gethostname(),
        "system": f"{system}, kernel {platform.release()}, {platform.machine()}",
        "CPU": cpu,
        "cores": f"{cores}" if usable == cores else f"{usable} of {cores}",
        "memory": f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        "GPUs": machine.ask_nvml(_describe_gpus, "") or "none found by NVML",
        "ddpctl": __version__,
        "number of ranks": str(config.local_world_size),
        "script": _script(config.command),
    }
    facts = {key: value for key, value in read_facts(config, environ).items() if key != "--check-only"}
    facts["driver"] = machine.driver_version() or NONE  # the machine's driver, whatever its ranks need
    in_image = environ.get(names.IMAGE) or "KUBERNETES_SERVICE_HOST" in environ  # the same on all nodes
    facts["packages"] = "" if in_image else _packages()
    return {key: value for key, value in (machine_facts | facts).items() if value not in ("", NONE)}


def _describe_gpus(nvml: Any) -> str:
    kinds = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
            kinds.append(f"{nvml.nvmlDeviceGetName(handle)} ({memory:.0f} GiB)")
        except nvml.NVMLError:  # lost, or not permitted
            kinds.append("unreadable")
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
