"""What must be the same on all nodes: the builds, the script and its configuration, the number of ranks.

Nothing of CUDA is initialised here: a rank that is forked later could not use it.
"""

import contextlib
import hashlib
import platform
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ddprun import health
from ddprun.contract import Contract
from ddpwire import names

LARGEST = 1 << 24  # bytes of a file that is hashed
NONE = "none"
OF_A_PLACE = ("rank", "node", "host", "addr", "local", "device")  # in the name of an argument that differs by design


def facts(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """What this node has, by what a person calls it."""
    return {
        "--check-only": "given" if contract.check_only else "not given",
        "torch": _torch(),
        "NCCL": _nccl(),
        "driver": health.driver_version() or NONE,
        "python": platform.python_version(),
        "image": environ.get(names.IMAGE) or NONE,
        "number of ranks": str(contract.nproc),
    } | {f"sha256 of {path.name}": _sha256(path) for path in _files(contract.command)}


def differences(mine: Mapping[str, str], firsts: Mapping[str, str], node: int) -> str:
    """Both values of all that differs between ``node`` and node 0; empty: nothing does."""
    return "; ".join(
        f"{what} is {mine.get(what, NONE)} on node {node}, but {firsts.get(what, NONE)} on node 0"
        for what in dict.fromkeys((*firsts, *mine))
        if mine.get(what, NONE) != firsts.get(what, NONE)
    )


def arguments(command: tuple[str, ...]) -> list[str]:
    """What the script is given, word by word, unreadable: it may hold a secret."""
    return [hashlib.sha256(word.encode(errors="surrogateescape")).hexdigest()[:12] for word in _arguments(command)]


def other_argument(command: tuple[str, ...], firsts: Sequence[str], node: int) -> str:
    """Which argument of the script is not what node 0 gives it; empty: none is, but for those that say a place.

    By its name only. A node may have reasons, which nobody can know here: so this never refuses one.
    """
    words = _arguments(command)
    if len(words) != len(firsts):
        return (
            f"the script has {len(words)} argument{'s' * (len(words) != 1)} on node {node}, but {len(firsts)} on node 0"
        )
    for index, (mine, first) in enumerate(zip(arguments(command), firsts, strict=True)):
        before = words[index - 1] if index and words[index - 1].startswith("-") else ""
        name = words[index].partition("=")[0] if words[index].startswith("-") else before
        if mine != first and not any(word in name.lower() for word in OF_A_PLACE):
            return f"{name or f'argument {index + 1}'} of the script is not the same on node {node} as on node 0"
    return ""


def config_sha256(command: tuple[str, ...]) -> str:
    """What tells one configuration from another: the script, its file and its arguments but those that say a place."""
    words = _arguments(command)
    module = command[command.index("-m") + 1] if "-m" in command[:2] else ""
    digest = hashlib.sha256(module.encode())
    for path in _files(command):
        digest.update(f"{path.name} {_sha256(path)}\n".encode(errors="surrogateescape"))
    for index, word in enumerate(words):
        before = words[index - 1] if index and words[index - 1].startswith("-") else ""
        name = word.partition("=")[0] if word.startswith("-") else before
        if not any(part in name.lower() for part in OF_A_PLACE):
            digest.update(word.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()[:12]


def image_digest(image: str) -> str:
    """The digest in an image's name, else the name: ``registry/name@sha256:...``, ``sha256:...``; none: no image."""
    return image.rpartition("@")[2] or NONE


def _arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    rest = command[1:] if Path(command[0]).name.startswith("python") else command
    return rest[2:] if rest[0] == "-m" else rest[1:]


def summary(facts: Mapping[str, str]) -> str:
    """The builds in a few words."""
    builds = ("torch", "NCCL", "driver", "python", "image")
    return ", ".join(f"{what} {facts[what]}" for what in builds if facts[what] != NONE)


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _nccl() -> str:
    import torch

    if not torch.version.cuda:
        return NONE
    with contextlib.suppress(Exception):  # a build that says CUDA and has no NCCL raises what it likes
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return NONE


def _files(command: tuple[str, ...]) -> list[Path]:
    """The script, and what it is given as --config: an output that lies there from a former run is not compared."""
    _, *arguments = command if Path(command[0]).name.startswith("python") else ("", *command)
    words = [word for argument in arguments for word in argument.split("=", 1)]
    configurations = [value for flag, value in pairwise(words) if flag.startswith("-") and "conf" in flag]
    return [path for path in map(Path, [*words[:1], *configurations]) if _is_file(path)]


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # an argument need not be a path at all
        return path.is_file() and path.stat().st_size <= LARGEST
    return False


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return f"not readable ({error.strerror})"
