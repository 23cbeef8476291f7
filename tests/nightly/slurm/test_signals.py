"""The signals to a batch script on a real Slurm, and what becomes of ranks that handle no signal.

The container runtime is a stand-in for apptainer: it starts ddprun on the node, with only the variables that are passed
to a container.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import Site, clear, start_soon, until
from tests.e2e.driver import SCRIPTS

from ddpwire.run_files import Outcome, read_outcome

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(1800),
]
FILE = """\
job: {name: plain, nodes: 2, gpus: 1, device: cpu, command: [script.py]}
target: none
targets:
  none: {kind: slurm, python: "%s"}
  apptainer: {kind: slurm, runtime: apptainer, sif: "%s"}
"""
APPTAINER = """\
#!/bin/bash
while [ "$1" != ddprun ]; do shift; done
variables=(PATH="$PATH" PYTHONPATH="$PYTHONPATH")
for name in "${!APPTAINERENV_@}"; do variables+=("${name#APPTAINERENV_}=${!name}"); done
exec env -i "${variables[@]}" %s -P -m "$@"
"""
PLAIN = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


class Runtimes(Site):
    """A site whose nodes have a stand-in for apptainer."""

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def launch(self, target: str, script: str = PLAIN) -> str:
        """Start a run of one rank per node, and return the number of its job once both ranks are ready."""
        (self.folder / "script.py").write_text(script)
        self.ddpctl("launch", "--target", target, "--name", "night", "--detach")
        until(lambda: self.log("night").count("] ready\n") == 2, 120, lambda: self.log("night"))
        return self.job("night")

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each node."""
        files = (self.folder / "state" / "night").glob("node-*/outcome.json")
        return [read_outcome(path.read_text()) for path in files]


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_lab.Slurm]:
    with slurm_lab.cluster(2, prefix="sigslurm") as cluster:
        yield cluster


@pytest.fixture
def site(slurm: slurm_lab.Slurm, tmp_path: Path) -> Iterator[Runtimes]:
    image = tmp_path / "image.sif"
    image.write_text("an image")
    (tmp_path / "ddpctl.yaml").write_text(FILE % (sys.executable, image))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER % sys.executable)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    yield Runtimes(slurm=slurm, folder=tmp_path)
    clear(slurm)


@pytest.mark.parametrize("target", ["none", "apptainer"])
def test_warning_requeues_a_job_whose_ranks_handle_no_signal_and_a_stop_ends_it(site: Runtimes, target: str) -> None:
    job = site.launch(target)
    site.sh("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    until(lambda: site.state(job) == "PENDING", 60, lambda: site.log("night"))
    assert [(outcome.code, outcome.cause) for outcome in site.outcomes()] == [(143, "stopped")] * 2
    assert "slurm: requeued\n" in site.log("night")
    start_soon(site, job)
    until(lambda: site.log("night").count("] ready\n") == 4, 120, lambda: site.log("night"))
    site.ddpctl("stop", "night")
    status = json.loads(site.ddpctl("status", "--json", "night"))
    assert (status["state"], status["code"]) == ("stopped", 143)
    assert site.state(job) == "FAILED"
    assert "ExitCode=143:0" in site.sh("scontrol", "show", "job", job)


@pytest.mark.parametrize("target", ["none", "apptainer"])
def test_scancel_ends_ranks_that_handle_no_signal_without_a_requeue(site: Runtimes, target: str) -> None:
    job = site.launch(target)
    site.sh("scancel", job)
    until(lambda: site.state(job) == "CANCELLED", 60, lambda: site.log("night"))
    assert [(outcome.code, outcome.cause) for outcome in site.outcomes()] == [(143, "stopped")] * 2
    assert "slurm: requeued" not in site.log("night")


def test_ctrl_c_is_sigterm_for_the_ranks_in_a_container(site: Runtimes) -> None:
    (script := site.folder / "script.py").write_text(PLAIN)
    file = str(site.folder / "ddpctl.yaml")
    launched = site.start("launch", "-f", file, "--target", "apptainer", "--name", "night", "--", str(script))
    until(lambda: site.log("night").count("] ready\n") == 2, 120, site.output)
    launched.send_signal(signal.SIGINT)
    launched.wait(90)
    assert [(outcome.code, outcome.cause) for outcome in site.outcomes()] == [(143, "stopped")] * 2
    assert site.state(site.job("night")) == "FAILED"  # it was not requeued


def test_killed_ddprun_in_a_container_is_requeued(site: Runtimes) -> None:
    job = site.launch("apptainer")
    site.sh("scancel", "--signal=KILL", f"{job}.{(site.folder / 'state/night/step').read_text().strip()}")
    until(lambda: site.state(job) == "PENDING", 60, lambda: site.log("night"))
    assert "slurm: requeued\n" in site.log("night")


@pytest.mark.parametrize("target", ["none", "apptainer"])
def test_run_in_an_allocation_is_interrupted_twice(site: Runtimes, target: str) -> None:
    """The script is signalled as a terminal would. Slurm has two nodes for it in an allocation of salloc."""
    script = (SCRIPTS / "interrupted.py").read_text().replace("sleep(2)", "sleep(300)").replace('"12"', '""')
    (site.folder / "script.py").write_text(script if target == "none" else PLAIN)
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--chdir={site.folder}")
    launch = (sys.executable, "-m", "ddpctl", "launch", "--target", target, "--name", "night", "--detach")
    command = ("salloc", *options, "sh", "-c", '"$@" && sleep 600', "sh", *launch)
    with (site.folder / "salloc.log").open("wb") as log:
        allocation = subprocess.Popen(
            site.slurm.head.command(*command),
            env=site.slurm.environ | site.env,
            cwd=site.folder,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        until(lambda: site.log("night").count("] ready\n") == 2, 120, lambda: site.log("night"))
        handle = json.loads((site.folder / "state" / "night" / "run.json").read_text())["handle"]
        os.kill(int(handle["pid"]), signal.SIGINT)
        if target == "none":
            until(lambda: site.log("night").count("] interrupted\n") == 2, 60, lambda: site.log("night"))
            os.kill(int(handle["pid"]), signal.SIGINT)
        until(lambda: len(site.outcomes()) == 2, 60, lambda: site.log("night"))
        code = 137 if target == "none" else 143
        assert [(outcome.code, outcome.cause) for outcome in site.outcomes()] == [(code, "stopped")] * 2
        assert re.search(rf"slurm: job {handle['job']} on node-\[0-1\]", site.log("night"))
        until(lambda: not Path(f"/proc/{handle['pid']}").exists(), 30, lambda: "the script has not ended")
        assert site.state(handle["job"]) == "RUNNING"  # the allocation stays
    finally:
        os.killpg(allocation.pid, signal.SIGKILL)
        allocation.wait(60)
