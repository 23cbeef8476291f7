"""Lose the reply to a launch at random moments, on real Slurm, on real sshds, and on this machine.

    python -m bench.lost_replies [slurm|ssh|local ...] [--rounds 20] [--gap 30] [--seed 1]

ddpctl is killed or interrupted at a random moment, its connections are cut, or sbatch loses Slurm's reply. Afterwards,
either nothing of the run is alive, or ps lists the run as not ended and stop ends it. Needs root, slurm-wlm and sshd.
"""

import argparse
import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster import slurm_lab, ssh_cluster

SCRIPT = "import time\ntime.sleep(900)\n"
MAIN = """\
from ddpctl.main import main
from ddpctl.operations import lost_replies
lost_replies.ANSWER_GAP_S = {gap}
main()
"""
ERROR = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
# LOSES: after (the job is submitted, and then the reply is lost), late (submitted 3 s later), never (not submitted).
SBATCH = f"""#!/bin/bash
case "$LOSES $*" in
  *--test-only*) exec /usr/bin/sbatch "$@" ;;
  after*) /usr/bin/sbatch "$@" >/dev/null ;;
  late*) (sleep 3; exec /usr/bin/sbatch "$@") >/dev/null 2>&1 & ;;
  never*) ;;
  kill-start*) job=$(/usr/bin/sbatch "$@") && echo "$job" >"$0.begun" && sleep 5 && exec cat "$0.begun" ;;
  *) exec /usr/bin/sbatch "$@" ;;
esac
echo '{ERROR}' >&2
exit 1
"""
END_S = 20.0  # how long a launch that was killed may still have effects
Command = Callable[..., list[str]]


class Place:
    """A target, and the ddpctl that launches on it."""

    def __init__(self, kind: str, folder: Path, command: Command, environ: dict[str, str], launch_s: float) -> None:
        self.sshds: tuple[int, ...] = ()
        self.begun = f"{folder}/runs/{{run}}/node-0"  # a pattern of files that exist once a node was started
        self.kind, self.folder, self.command, self.launch_s = kind, folder, command, launch_s
        self.environ = environ | {"DDPCTL_STATE_DIR": str(folder / "runs"), "PATH": f"{folder}:{os.environ['PATH']}"}
        (folder / "sleep.py").write_text(SCRIPT)

    def start(self, gap_s: float, *argv: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(sys.executable, "-c", MAIN.format(gap=gap_s), *argv),
            env=self.environ | env, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def ddpctl(self, *argv: str, **env: str) -> tuple[int, str]:
        process = self.start(30.0, *argv, **env)
        text, _ = process.communicate(timeout=300)
        return process.returncode, text

    def alive(self, run: str) -> list[str]:
        """Return the run's jobs that have not ended, and its processes."""
        alive = []
        if self.kind == "slurm":
            squeue = ("squeue", "--noheader", f"--name={run}", "--format=job %i %T")
            done = subprocess.run(
                self.command(*squeue), env=self.environ, capture_output=True, text=True, check=True, timeout=60
            )
            alive = done.stdout.splitlines()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"DDP_RUN_ID={run}".encode() in variables and " Z " not in (process / "stat").read_text():
                    alive.append(process.name)
        return alive


@contextlib.contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    job = "job: {name: sleep, nodes: 1, gpus: 1, device: cpu, grace: 2, command: [sleep.py]}\n"
    if kind == "ssh":
        with ssh_cluster.cluster(folder) as lab:
            (folder / "ddpctl.yaml").write_text(
                f"{job}target: boxes\ntargets: {{boxes: {{kind: ssh, runtime: none, project: sync, python: "
                f"{sys.executable}, hosts: [{', '.join(box.address for box in lab.boxes)}]}}}}\n".replace(
                    "nodes: 1", "nodes: 2"
                )
            )
            at = Place(kind, folder, lab.laptop.command, lab.variables, 5)
            at.sshds = tuple(box.process.pid for box in lab.boxes if box.process)
            at.begun = str(lab.boxes[0].home.parents[1] / "*/home/.ddpctl/claims-*/run-{run}.*")
            yield at
    elif kind == "slurm":
        (folder / "sbatch").write_text(SBATCH)
        (folder / "sbatch").chmod(0o755)
        with slurm_lab.cluster(1, gpus=0) as lab_of_slurm:
            options = f"{{kind: slurm, python: {sys.executable}}}"
            (folder / "ddpctl.yaml").write_text(f"{job}target: hpc\ntargets: {{hpc: {options}}}\n")
            at = Place(kind, folder, lab_of_slurm.head.command, lab_of_slurm.environ, 3)
            at.begun = f"{folder}/sbatch.begun"
            yield at
    else:
        (folder / "ddpctl.yaml").write_text(job)
        yield Place(kind, folder, lambda *argv: list(argv), dict(os.environ), 5)


def cut(sshds: tuple[int, ...]) -> None:
    """Kill the sshds that serve a connection; those that listen remain."""
    for pid in sshds:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(child), signal.SIGKILL)


def lose(place: Place, run: str, how: str, gap_s: float) -> str:
    """Launch a run, lose its reply, and return what is wrong afterwards."""
    (place.folder / "sbatch.begun").unlink(missing_ok=True)
    launch = place.start(gap_s, "launch", "--detach", "--name", run, LOSES=how if place.kind == "slurm" else "")
    moment_s = random.uniform(0.3, place.launch_s)  # noqa: S311 -- no secret
    if how in ("kill", "interrupt", "cut", "cut-start", "kill-start"):
        if how.endswith("-start"):  # a node was started, and ddpctl does not yet know it
            begun, moment_s = time.monotonic(), 0.0
            while launch.poll() is None and not glob.glob(place.begun.format(run=run)):  # noqa: PTH207 -- absolute
                moment_s = time.monotonic() - begun
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.wait(moment_s)
        if launch.poll() is None and how.startswith("cut"):
            cut(place.sshds)
        elif launch.poll() is None:
            launch.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    text, _ = launch.communicate(timeout=300)
    before = None
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and (alive := place.alive(run)) != before:
        before = alive
        time.sleep(5)
    _, listing = place.ddpctl("ps", "--json")
    listed = {row["run"]: row["state"] for row in json.loads(listing[listing.index("[") :])} if "[" in listing else {}
    row = f"{place.kind} {how} at {moment_s:.1f} s: exit {launch.returncode}, {len(alive)} alive, ps: {listed.get(run)}"
    stopped = place.ddpctl("stop", "--kill", run) if run in listed else (0, "")
    if alive and listed.get(run) in (None, "lost", "succeeded", "failed", "stopped"):
        return f"{row}: NOT LISTED\n{text}\n{listing}"
    if alive and (stopped[0] or place.alive(run)):
        return f"{row}: NOT STOPPED\n{text}\n{stopped}"
    print(row, text.strip().splitlines()[-1:], flush=True)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["slurm", "ssh", "local"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--gap", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    wrong = []
    hows = {
        "slurm": ["after", "kill", "late", "kill-start", "never", "interrupt"],
        "ssh": ["cut", "kill", "cut-start", "interrupt", "kill-start"],
    }
    for kind in args.kinds:
        with tempfile.TemporaryDirectory(prefix="lost") as folder, place(kind, Path(folder)) as at:
            for number in range(args.rounds):
                ways = hows.get(kind, ["kill", "interrupt", "kill-start"])
                wrong += filter(None, [lose(at, f"{kind}-{number}", ways[number % len(ways)], args.gap)])
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
