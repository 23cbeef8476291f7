"""The results of the checks, the expected value and the advice of each check, and how nodes are compared.

Versions must be the same on all nodes. A speed is compared with the median of the other nodes' speeds.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ddpwire.machine import SHM_DIR

SLOW, VERY_SLOW = 0.8, 0.5  # of the others' median
FEW = 3  # with fewer nodes, a difference does not show which node is wrong
SHORT = 12  # characters of a sha256

Status = Literal["ok", "warning", "bad", "not looked at"]
RESET = "reset the GPU (nvidia-smi --gpu-reset) or reboot; if it happens again, replace the GPU"
SPEED = ("80 % of the others' median", "compare its clocks, power settings and memory with the others'")
ADVICE: dict[str, tuple[str, str]] = {  # what is expected, what to do
    "GPUs": ("all answer", RESET),
    "GPU memory": ("no uncorrected error, no row to remap", RESET),
    "PCIe": ("the width of the slot", "reseat the card, or its riser"),
    "NVLink": ("all links up, no recovery", f"nvidia-smi nvlink -s; {RESET}"),
    "MIG": ("off", "a process has one instance, and NCCL joins none: nvidia-smi -mig 0, then reset the GPU"),
    "GPU processes": ("none", "wait until they end, or use other GPUs"),
    "GPU clocks": ("not slowed down", "check the cooling and the power supply (nvidia-smi -q -d PERFORMANCE)"),
    "Xid": ("none of the hardware", RESET),
    "DCGM": ("diag -r 1 passes", "run dcgmi diag -r 2, which tests more"),
    "GPU matmul": SPEED,
    "GPUs and driver": ("the same on all nodes", "make all nodes the same"),
    "libraries": ("the same on all nodes", "install the same build on all nodes"),
    SHM_DIR: ("1 GiB, and 256 MiB a GPU", "docker run --shm-size, in Kubernetes an emptyDir of medium Memory"),
    "memlock": ("unlimited", "ulimit -l unlimited before the container starts: else NCCL leaves InfiniBand for TCP"),
    "InfiniBand": (
        "its devices and libibverbs in the container",
        "Kubernetes: profile: rdma; Slurm, SSH: runtime_args --device=/dev/infiniband; image: apt install libibverbs1 "
        "ibverbs-providers",
    ),
    "open files": ("1024, and 4 a rank of the run", "ulimit -n, or LimitNOFILE of the service that starts the node"),
    "disk": ("a file can be written, 2 GiB free, 10 MB/s", "delete files, or set another checkpoint_dir"),
    "interfaces": ("each in a subnet of its own", "disable one, or name one in NCCL_SOCKET_IFNAME"),
    "container runtime": ("nvidia-ctk on a node with GPUs", "install nvidia-container-toolkit"),
    "CPU": ("75 % of a core", "raise the quota (docker --cpus, limits.cpu, CPUQuota), or stop other programs (top)"),
    "CPU matmul": SPEED,
    "CPU memory": SPEED,
    "ports": ("all TCP ports open between the nodes", "open them: gloo and NCCL listen on ports the kernel chooses"),
    "path MTU": ("what the interfaces have", "large messages hang: set the same MTU on interfaces and links"),
    "names": ("the same address everywhere, none of the loopback", "correct /etc/hosts on that node"),
    "clock": ("less than 2 s from the others", "start NTP (timedatectl set-ntp true): times in logs are wrong"),
    "answer": ("a report", "ddpctl logs RUN"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check on one node. ``node`` is set once the findings of all nodes are combined."""

    check: str
    status: Status
    value: str
    node: int = 0


def compare_builds(check: str, builds: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield one finding per node: bad if a value differs from the value on more than half of the nodes.

    If no value is on more than half of the nodes, the finding of each node is a warning, because it is not known which
    nodes are right. If only the driver differs, and its branch is the same (570 in 570.86.15), it is a warning, too.
    """
    keys = dict.fromkeys(key for build in builds.values() for key in build)
    counts = {key: Counter(build.get(key, "none") for build in builds.values()).most_common() for key in keys}
    usual = {key: values[0][0] for key, values in counts.items() if 2 * values[0][1] > len(builds)}
    for node, build in builds.items():
        other = {key: build.get(key, "none") for key in keys if build.get(key, "none") != usual.get(key)}
        wrong = other.keys() & usual.keys()
        patch = wrong == {"driver"} and other["driver"].split(".")[0] == usual["driver"].split(".")[0]
        usual_values = {key: [_short(value) for value, _ in counts[key] if value != other[key]] for key in other}
        differences = [f"{key} {_short(other[key])}, elsewhere {' or '.join(usual_values[key])}" for key in other]
        differences = differences or [f"{key} {value}" for key, value in build.items() if len(value) < 64]
        unsure = " (it is not known which nodes are right)" if other.keys() - wrong else ""
        status: Status = "ok" if not other else "bad" if wrong and not patch else "warning"
        yield Finding(check, status, ", ".join(differences) + unsure, node)


def _short(value: str) -> str:
    return value[:SHORT] if len(value) == 64 else value


def compare_speed(
    check: str, speeds: Mapping[int, float], unit: str, *, loaded: Collection[int] = ()
) -> Iterator[Finding]:
    """Yield one finding per node: a warning below 80 % of the others' median, bad below 50 %.

    On the nodes in ``loaded``, the finding is at most a warning, because other programs used the cores or GPUs. With
    fewer than three nodes, each finding is at most a warning, because it may be the faster node that is unusual.
    """
    for node, speed in speeds.items():
        usual = median([other for number, other in speeds.items() if number != node] or [speed])
        ratio = speed / usual if usual else 1.0
        sure = len(speeds) >= FEW and node not in loaded
        status: Status = "ok" if ratio >= SLOW else "bad" if ratio < VERY_SLOW and sure else "warning"
        slow = f", {math.floor(100 * ratio)} % of the others' median" if status != "ok" else ""
        busy = ", beside other programs" if slow and node in loaded else ""
        yield Finding(check, status, f"{speed:.3g} {unit}{slow}{busy}", node)
