"""Who has which GPUs of a host, and who waits: a host's scripts in its shell, with real processes and locks."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import wait_until

from ddpctl.command import Output
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import Facts, host_report, parse_facts
from ddpwire.run_files import COPY, COPY_PART

OPTIONS = SshOptions(hosts=(SshHost(address="box1"),), runtime="none")
FOLDER = scripts.claims_folder(OPTIONS.home)
PYTHON = '#!/bin/sh\necho $$ >"$HOME/pid-$DDP_RUN_ID"\nexec sleep 600\n'
SMI = """#!/bin/sh
case "$*" in
  *utilization*) printf 'GPU-0, 93, 2048, 16384\\nGPU-1, [N/A], 5, 16384\\n' ;;
  *query-gpu*) printf 'GPU-0\\nGPU-1\\n' ;;
esac
"""


class Host:
    """A home with a python that lives on, and an nvidia-smi."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {"HOME": str(home), "PATH": f"{home}/bin:/usr/bin:/bin"}
        (home / "bin").mkdir()
        for name, text in (("python", PYTHON), ("nvidia-smi", SMI)):
            (home / "bin" / name).write_text(text)
            (home / "bin" / name).chmod(0o755)
        self.sessions: list[subprocess.Popen[str]] = []

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["/bin/sh"], input=text, env=self.environ, capture_output=True, text=True, timeout=60)

    def start(self, run: str, *gpus: str) -> subprocess.CompletedProcess[str]:
        """A node of a run; its pid is in a file when it continues."""
        done = self.run(
            scripts.start_node(
                OPTIONS,
                run,
                0,
                scripts.launch_process(OPTIONS, run, 0, ("~/bin/python",), {"DDP_RUN_ID": run}, folder="~/"),
                gpus=gpus,
                checkpoints="~/c",
                secret="",
            )
        )
        if done.returncode == 0:
            wait_until(lambda: self.pid(run), f"the process of {run}")
        return done

    def pid(self, run: str) -> int:
        path = self.home / f"pid-{run}"
        return int(path.read_text() or 0) if path.exists() else 0

    def facts(self) -> Facts:
        done = self.run(f"{scripts.gpus_text(OPTIONS)}\nsay end yes\n")
        assert (done.returncode, done.stderr) == (0, "")
        return parse_facts(Output(returncode=0, stdout=done.stdout))

    def wait(self, run: str) -> subprocess.Popen[str]:
        """A session that holds a ticket, as the executor holds it: its stdin stays open."""
        pipe = subprocess.PIPE
        session = subprocess.Popen(["/bin/sh"], env=self.environ, stdin=pipe, stdout=pipe, text=True)
        self.sessions.append(session)
        assert session.stdin
        assert session.stdout
        session.stdin.write(claims.take_ticket(FOLDER, run, f"uid-{run}"))
        session.stdin.flush()
        assert int(session.stdout.readline()) > 0
        return session

    def line(self) -> list[str]:
        return [run for run, _ in self.facts().tickets]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    home = Host(tmp_path)
    yield home
    for session in home.sessions:
        with session:
            session.kill()
    for path in tmp_path.glob("pid-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_the_cores_of_a_host_do_not_depend_on_the_variables_of_openmp() -> None:
    def load(**variables: str) -> str:
        text = scripts.gpus_text(OPTIONS, load=True)
        environ = {"PATH": "/usr/bin:/bin", "HOME": "/", **variables}
        done = subprocess.run(
            ["/bin/sh", "-c", text], env=environ, capture_output=True, text=True, timeout=60, check=True
        )
        return next(line for line in done.stdout.splitlines() if line.startswith("load ")).split()[2]

    assert load(OMP_NUM_THREADS="77") == load(OMP_THREAD_LIMIT="1") == str(len(os.sched_getaffinity(0)))


def test_launches_wait_in_line_without_the_lock(host: Host) -> None:
    for run in ("night", "day"):
        host.wait(run)
    assert host.line() == ["night", "day"]


def test_a_copy_that_was_cut_is_no_checkpoint(host: Host) -> None:
    (host.home / "c").mkdir()
    for name in ("step-1.pt", COPY_PART):
        (host.home / "c" / name).touch()
    text = scripts.facts_script(OPTIONS, image="", script=None, checkpoints="~/c")
    assert "\ncheckpoint " not in host.run(text).stdout
    (host.home / "c" / COPY).touch()
    assert "\ncheckpoint step-1.pt\n" in host.run(text).stdout


def test_two_runs_share_a_host_and_who_dies_loses_its_gpus(host: Host) -> None:
    assert host.start("night", "GPU-0").returncode == 0
    refused = host.start("late", "GPU-1", "GPU-0")
    assert (refused.returncode, refused.stderr) == (claims.BUSY, "the run night has GPU-0\n")
    assert host.start("day", "GPU-1").returncode == 0
    assert host.start("cpu").returncode == 0  # CPU ranks take no GPU from anybody
    assert {claim.run: claim.gpus for claim in host.facts().claims} == {
        "night": ("GPU-0",),
        "day": ("GPU-1",),
        "cpu": (),
    }
    assert host.facts().free_gpus == ()
    done = host.run(f"{scripts.gpus_text(OPTIONS, load=True)}\nsay end yes\n")
    report = host_report(OPTIONS.hosts[0], Output(returncode=0, stdout=done.stdout))
    assert [(gpu.uuid, gpu.run, gpu.busy_percent, gpu.memory_mib) for gpu in report.gpus] == [
        ("GPU-0", "night", 93, 2048),
        ("GPU-1", "day", None, 5),
    ]
    assert [run.run for run in report.cpu_runs] == ["cpu"]
    assert report.load is not None
    assert report.failure == ""
    os.kill(host.pid("night"), signal.SIGKILL)
    wait_until(lambda: host.facts().free_gpus == ("GPU-0",), "the free GPU")
    assert host.start("late", "GPU-0").returncode == 0
    assert not list(host.home.glob(".ddpctl/claims-*/run-night.0"))
