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

from bench.measuring import runtime_files
from tests.cluster import slurm_lab
from tests.e2e.driver import PACED

from ddprank.heartbeat import read_beat
from ddpwire.run_files import rank_heartbeat

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "examples" / "slurm.yaml")
LONG = ("--", str(PACED), "--epochs", "2000")
SLOW = ("-e", "SLOW=/none")  # for LONG: ten steps a second, so that it leaves the cores to others
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
STEPS = re.compile(r"step-0*(\d+)\.pt")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The cluster, and a folder of this test's own on the filesystem that its nodes share."""

    slurm: slurm_lab.Slurm
    folder: Path

    def process(self, *argv: str, timeout_s: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run a program on the login node, in this test's folder."""
        return self.slurm.run(
            "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *argv, env=self.env, timeout_s=timeout_s
        )

    def sh(self, *argv: str, timeout_s: float = 300, check: bool = True) -> str:
        """Run a program on the login node, and return what it writes."""
        done = self.process(*argv, timeout_s=timeout_s)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        """Run ddpctl, whatever its exit code."""
        return self.process(sys.executable, "-m", "ddpctl", *argv)

    def ddpctl(self, *argv: str, timeout_s: float = 300, check: bool = True) -> str:
        return self.sh(sys.executable, "-m", "ddpctl", *argv, timeout_s=timeout_s, check=check)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start ddpctl beside the test. ``output`` returns what it writes."""
        command = (sys.executable, "-m", "ddpctl", *argv)
        return self.slurm.start(*command, output=self.folder / "logs.txt", env=self.env)

    def output(self) -> str:
        """Return what the ddpctl that was started last has written."""
        return (self.folder / "logs.txt").read_text()

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

    def until_log(self, run: str, pattern: str, timeout_s: float = 120) -> None:
        """Wait for a line in a run's log; fail at once if its job has ended."""

        def is_there() -> bool:
            state = self.state(self.job(run))
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state}: {self.log(run)}"
            return re.search(pattern, self.log(run)) is not None

        until(is_there, timeout_s, lambda: f"no {pattern!r} in the log: {self.log(run)[-3000:]}")

    @staticmethod
    def steps(run_dir: Path) -> int:
        """Return the last step of rank 0."""
        beat = next(map(read_beat, runtime_files(run_dir, rank_heartbeat(0))), None)
        return (beat.step if beat else None) or 0

    def checkpoints(self, run: str) -> list[int]:
        paths = (self.folder / "state" / run / "checkpoints").glob("*.pt")
        return sorted(int(match[1]) for path in paths if (match := STEPS.fullmatch(path.name)))


def until(condition: Callable[[], object], limit_s: float, describe: Callable[[], str]) -> None:
    """Wait until ``condition()`` is true; after ``limit_s``, fail with what ``describe()`` says."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {describe()}"
        time.sleep(0.3)


def assert_trained(log: str, ranks: int) -> None:
    """Assert that the digits were learned by so many ranks."""
    assert re.search(rf"world size +{ranks}\n", log), log
    accuracy = re.search(r"test accuracy +([0-9.]+) %", log)
    assert accuracy, log
    assert float(accuracy[1]) >= 98


def clear(slurm: slurm_lab.Slurm) -> None:
    """Cancel what a test has left in the queue, and wait until the nodes are free."""
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.run("squeue", "--noheader").stdout.strip(), 60, lambda: slurm.run("squeue").stdout)


def start_soon(site: Site, job: str) -> None:
    """Let a requeued job start again in five seconds, and not in two minutes.

    Slurm takes that once its nodes have let the job go. A node refuses a job's credential of the second in which the
    job ended there ("Job credential revoked").
    """
    update = ("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    until(lambda: site.slurm.run(*update).returncode == 0, 60, lambda: site.sh("scontrol", "show", "job", job))


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
