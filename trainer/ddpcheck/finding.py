"""The result of a check on a node, as data; for each check also what is expected and what to do."""

from dataclasses import dataclass
from typing import Literal

from ddpwire.machine import SHM_DIR

Status = Literal["ok", "warning", "bad", "not looked at"]
RESET = "reset the GPU (nvidia-smi --gpu-reset) or reboot; where it comes back, have it replaced"
SPEED = ("80 % of the others' median", "compare its clocks, power settings and memory with the others'")
ADVICE: dict[str, tuple[str, str]] = {  # what is expected, what to do
    "GPUs": ("all answer", RESET),
    "GPU memory": ("no uncorrected error, no row to remap", RESET),
    "PCIe": ("the width of the slot", "reseat the card, or its riser"),
    "NVLink": ("all links up, no recovery", f"nvidia-smi nvlink -s; {RESET}"),
    "MIG": ("off", "a process has one instance, and NCCL joins none: nvidia-smi -mig 0, then reset the GPU"),
    "GPU processes": ("none", "wait for them, or take other GPUs"),
    "GPU clocks": ("not slowed down", "look after cooling and power supply (nvidia-smi -q -d PERFORMANCE)"),
    "Xid": ("none of the hardware", RESET),
    "DCGM": ("diag -r 1 passes", "dcgmi diag -r 2 says more"),
    "GPU matmul": SPEED,
    "GPUs and driver": ("what most nodes have", "make all nodes the same"),
    "libraries": ("what most nodes have", "install the same build on all nodes"),
    SHM_DIR: ("1 GiB, and 256 MiB a GPU", "docker run --shm-size, in Kubernetes an emptyDir of medium Memory"),
    "memlock": ("unlimited", "ulimit -l unlimited before the container starts: else NCCL leaves InfiniBand for TCP"),
    "open files": ("1024, and 4 a rank of the run", "ulimit -n, or LimitNOFILE of the service that starts the node"),
    "disk": ("a file can be written, 2 GiB free, 10 MB/s", "make room, or give another checkpoint_dir"),
    "interfaces": ("each in a subnet of its own", "take one down, or name one in NCCL_SOCKET_IFNAME"),
    "container runtime": ("nvidia-ctk where there are GPUs", "install nvidia-container-toolkit"),
    "CPU": ("75 % of a core", "raise the quota (docker --cpus, limits.cpu, CPUQuota), or stop what else runs (top)"),
    "CPU matmul": SPEED,
    "CPU memory": SPEED,
    "ports": ("all TCP ports open between the nodes", "open them: gloo and NCCL listen on ports the kernel chooses"),
    "path MTU": ("what the interfaces have", "large messages hang: give interfaces and links the same MTU"),
    "names": ("the same address everywhere, none of the loopback", "mend /etc/hosts there"),
    "clock": ("less than 2 s from the others", "start NTP (timedatectl set-ntp true): times in logs are wrong"),
    "answer": ("a report", "ddpctl logs RUN"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check on one node. ``node`` is set when the findings of all nodes are combined."""

    check: str
    status: Status
    value: str
    node: int = 0
