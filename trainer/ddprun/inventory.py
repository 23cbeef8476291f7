"""``environment.json``: what machine and what builds a node had, for who reads of the run when both are gone.

Names and sizes only, as a flat list of words: nothing of the environment's variables is in it.
"""

import contextlib
import json
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ddprun import machine, versions
from ddprun.contract import Contract
from ddpwire.folder import ENVIRONMENT, write_atomic
from ddpwire.version import __version__

GIB = 1 << 30


def keep(node_dir: Path, contract: Contract, environ: Mapping[str, str]) -> None:
    """Write it. A disk that is full stops no training."""
    text = json.dumps(inventory(contract, environ), indent=1) + "\n"
    with contextlib.suppress(OSError):
        write_atomic(node_dir / ENVIRONMENT, text.encode(errors="replace"))


def inventory(contract: Contract, environ: Mapping[str, str]) -> dict[str, str]:
    """What this node has, by what a person calls it; what cannot be told is left out."""
    cores, usable = os.cpu_count() or 1, machine.usable_cores()
    found = {
        "host": socket.gethostname(),
        "system": f"{_system()}, kernel {platform.release()}, {platform.machine()}",
        "CPU": _cpu(),
        "cores": f"{cores}" if usable == cores else f"{usable} of {cores}",
        "memory": f"{psutil.virtual_memory().total / GIB:.1f} GiB",
        "GPUs": _gpus(),
        "ddpctl": __version__,
    }
    asked = {key: value for key, value in versions.facts(contract, environ).items() if key != "--check-only"}
    return {key: value for key, value in (found | asked).items() if value not in ("", versions.NONE)}


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return platform.system()


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor()


def _gpus() -> str:
    """Each kind of GPU and how many there are of it: 8 x NVIDIA H200 (140 GiB)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        kinds = [_gpu(pynvml, handle) for handle in handles]
    except Exception:  # no driver, or no library: NVML has an error for each
        return ""
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def _gpu(nvml: Any, handle: Any) -> str:
    name = nvml.nvmlDeviceGetName(handle)
    text = name.decode() if isinstance(name, bytes) else name
    return f"{text} ({nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB:.0f} GiB)"
