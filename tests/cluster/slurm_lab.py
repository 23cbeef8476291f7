"""A real Slurm cluster on this machine: a controller and nodes, each with a name and an address of its own.

Needs root on Linux, slurm-wlm and munge. It knows Slurm and nothing of runs. The machines are those of bench/lab.py;
the last one is the controller.
"""

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import lab

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip")
START_S = 30.0
END_S = 10.0
NVIDIA = 195  # the major number of its device files; Slurm tells GPUs by it

# Fast, for tests: no accounting, no cgroups, a scheduler that looks all the time. ReturnToService: a node that was
# down, and is back, is used again.
CONF = """\
ClusterName=lab
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmdTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    if sys.platform != "linux" or os.getuid():
        return "needs root on Linux (network namespaces)"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"needs {', '.join(absent)} (apt install slurm-wlm munge iproute2)" if absent else ""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A cluster that is up."""

    head: lab.Machine  # the controller, where jobs are submitted
    nodes: tuple[lab.Machine, ...]  # node-0, node-1, ...
    folder: Path  # slurm.conf, the daemons' logs, jobs.txt
    environ: dict[str, str]  # of whatever is to speak to it

    def run(
        self, *argv: str, env: dict[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """``argv`` on the controller, to its end."""
        return subprocess.run(
            self.head.command(*argv),
            env=self.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *argv: str, output: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """``argv`` on the controller, beside the caller."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.head.command(*argv), env=self.environ | (env or {}), stdout=file, stderr=subprocess.STDOUT
            )


@contextlib.contextmanager
def cluster(num_nodes: int = 2, *, gpus: int = 2, prefix: str = "slurm") -> Iterator[Slurm]:
    """A cluster whose nodes are idle, with ``gpus`` device files each that stand for GPUs; gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
        *nodes, head = stack.enter_context(lab.machines(num_nodes + 1, prefix=prefix))
        _write(folder, head, tuple(nodes), gpus)
        environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        munge = folder / "munge"
        parts = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        daemons = {
            "munged": head.command("munged", "--foreground", *(f"--{part}={munge / at}" for part, at in parts.items()))
        }
        daemons["slurmctld"] = head.command("slurmctld", "-D")
        daemons |= {f"slurmd-{node.name}": node.command("slurmd", "-D") for node in nodes}
        for name, command in daemons.items():
            process = stack.enter_context(_running(command, folder / f"{name}.log", environ))
            if name == "munged":
                _wait(lambda: (munge / "socket").exists(), folder, process)
        slurm = Slurm(head=head, nodes=tuple(nodes), folder=folder, environ=environ)
        _wait(lambda: slurm.run("sinfo", "-hNo", "%t").stdout.split() == ["idle"] * num_nodes, folder, process)
        yield slurm


def _write(folder: Path, head: lab.Machine, nodes: tuple[lab.Machine, ...], gpus: int) -> None:
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs=8 RealMemory=8000{gres}" for node in nodes]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, head=head, nodes="\n".join(lines)))
    for index in range(gpus):  # a plain file would leave CUDA_VISIBLE_DEVICES unset
        os.mknod(folder / f"nvidia{index}", stat.S_IFCHR | 0o600, os.makedev(NVIDIA, index))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-{gpus - 1}]\n" if gpus else "")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; but slurmd looks for one, and finds none
    folder.chmod(0o755)
    (folder / "munge").mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


@contextlib.contextmanager
def _running(command: list[str], log: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon in the foreground. What it leaves behind goes with its machine."""
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


def _wait(is_there: Callable[[], bool], folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline:
            last = [f"{log.stem}: {line}" for log in folder.glob("*.log") for line in log.read_text().splitlines()[-3:]]
            raise RuntimeError("\n".join(["Slurm did not come up:", *last]))
        time.sleep(0.05)
