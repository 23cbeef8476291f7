"""A person on a real Slurm cluster (slurm_lab): a folder that all nodes see, ddpctl on the controller, an sshd."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import slurm_lab

ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
STEPS = re.compile(r"step-0*(\d+)\.pt")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The cluster, and a folder of this test's own on the filesystem that its nodes share."""

    slurm: slurm_lab.Slurm
    folder: Path

    def sh(self, *argv: str, timeout_s: float = 300, check: bool = True) -> str:
        """What a program says on the login node."""
        done = self.slurm.run(
            "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *argv, env=self.env, timeout_s=timeout_s
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ddpctl(self, *argv: str, timeout_s: float = 300, check: bool = True) -> str:
        return self.sh(sys.executable, "-m", "ddpctl", *argv, timeout_s=timeout_s, check=check)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """ddpctl, beside the test; what it says goes to logs.txt."""
        command = (sys.executable, "-m", "ddpctl", *argv)
        return self.slurm.start(*command, output=self.folder / "logs.txt", env=self.env)

    @property
    def env(self) -> dict[str, str]:
        packages = os.pathsep.join((str(ROOT / "cli"), str(ROOT / "trainer")))
        return {
            "PYTHON": sys.executable,
            "PYTHONPATH": packages,
            "DDPCTL_STATE_DIR": str(self.folder / "state"),
            "DDP_NODES_HERE": "3",  # they share this machine's cores
        }

    def state(self, job: str) -> str:
        """Slurm's word for a job."""
        return self.sh("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T", check=False).strip()

    def job(self, run: str) -> str:
        return str(json.loads((self.folder / "state" / run / "run.json").read_text())["handle"]["job"])

    def log(self, run: str) -> str:
        path = self.folder / "state" / run / "job.log"
        return path.read_text() if path.exists() else ""

    def checkpoints(self, run: str) -> list[int]:
        found = (self.folder / "state" / run / "checkpoints").glob("*.pt")
        return sorted(int(match[1]) for path in found if (match := STEPS.fullmatch(path.name)))


def until(there: Callable[[], object], limit_s: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < deadline, why()
        time.sleep(0.3)


@contextlib.contextmanager
def login_node(site: Site) -> Iterator[None]:
    """An sshd on the controller, and a home in which ssh knows it as hpc. Its runs are under this test's folder."""
    box, home = site.folder / "sshd", site.folder / "laptop" / ".ssh"
    box.mkdir()
    home.mkdir(parents=True, mode=0o700)
    for key in (box / "host", home / "id_ed25519"):
        subprocess.run(["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    head = site.slurm.head
    host_key = " ".join((box / "host.pub").read_text().split()[:2])
    (home / "known_hosts").write_text(f"[{head.address}]:2222 {host_key}\n")
    (home / "config").write_text(f"Host hpc\n  HostName {head.address}\n  Port 2222\n  User root\n")
    (box / "keys").write_text((home / "id_ed25519.pub").read_text())
    env = site.env | {"SLURM_CONF": site.slurm.environ["SLURM_CONF"], "HOME": str(site.folder)}
    (box / "config").write_text(
        f"Port 2222\nHostKey {box}/host\nAuthorizedKeysFile {box}/keys\nPermitRootLogin yes\nStrictModes no\n"
        f"PidFile none\nUsePAM no\nSetEnv {' '.join(f'{name}={value}' for name, value in env.items())}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with subprocess.Popen(head.command(str(SSHD), "-D", "-f", f"{box}/config"), env=site.slurm.environ) as sshd:
        try:
            until(lambda: site.sh("sh", "-c", "ss -ltn | grep :2222", check=False), 10, lambda: "no sshd")
            yield
        finally:
            sshd.terminate()
