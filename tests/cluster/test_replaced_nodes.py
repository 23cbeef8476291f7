"""A controller replaces the nodes of a run: namespaces stand for pods, each with a new address after its loss.

Node 0's name answers late, and for a while with the address of the node 0 before. The nodes that are left keep their
ddprun. DDPCTL_TEST_REPLACEMENTS is how often each node is replaced; a table of all is printed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lab
import pytest
from fault_injection import job as fault_job
from fault_injection.experiment import counted
from fault_injection.job import NODES, WORLD, Job

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: nodes are network namespaces"),
    pytest.mark.skipif(
        shutil.which("ip") is None or not Path("/proc/self/ns/net").exists(),
        reason="needs Linux and ip (apt install iproute2): nodes are network namespaces",
    ),
]
TIMES = int(os.environ.get("DDPCTL_TEST_REPLACEMENTS", "2"))
STEPS = 40 + 40 * TIMES
NAME, NAME_SERVER = "run-0.pods", "10.77.0.1"
LIMIT_S = 240.0
LATE_S, OLD_S = 1.0, 5.0  # how late the name answers, and for how long with the old address
REPLACED = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "DDP_NODE_REPLACED": "1"}
SERVER = Path(__file__).parent / "scripts" / "name_server.py"


@pytest.fixture
def weights(once: Callable[[str, Callable[[], str]], str], tmp_path: Path) -> str:
    """The weights of an undisturbed run."""

    def train() -> str:
        options = {"prefix": "calm", "script_args": ("--steps", str(STEPS), "--pause", "0", "--timeout", "240")}
        with fault_job.start_job(tmp_path / "calm", **options) as job:
            job.start()
            job.until(job.has_ended, "the end of an undisturbed run", LIMIT_S)
            (found,) = set(job.weights().values())
            return found

    return once("replaced", train)


@contextlib.contextmanager
def name_server(job: Job, names: Path) -> Iterator[None]:
    """Serve ``names`` to the nodes, from the switch."""
    switch = job.machines[0].switch
    lab.ip("-n", switch, "addr", "add", f"{NAME_SERVER}/24", "dev", "br0")
    for machine in job.machines:
        machine.write_hosts("")
        resolver = lab.HOSTS / machine.namespace / "resolv.conf"
        resolver.write_text(f"nameserver {NAME_SERVER}\noptions timeout:3 attempts:2\n")
    command = ["ip", "netns", "exec", switch, sys.executable, str(SERVER), NAME_SERVER, str(names), str(LATE_S)]
    with subprocess.Popen(command) as server:
        try:
            yield
        finally:
            server.kill()


def remove(job: Job, node: int, how: signal.Signals) -> None:
    """End a node as the deletion of its pod does (SIGTERM), or the loss of its machine (SIGKILL)."""
    machine = job.machines[node]
    if how == signal.SIGKILL:
        machine.cut()
        machine.kill()
    else:
        job.processes[node].send_signal(how)
    job.until(lambda: job.has_ended(node), f"the end of node {node}")
    shutil.rmtree(job.folder / f"node-{node}")  # its emptyDir; the checkpoints are on a claim


def give_new_address(job: Job, node: int, address: str) -> None:
    machine = job.machines[node]
    machine.ip("addr", "flush", "dev", "eth0")
    machine.ip("addr", "add", f"{address}/24", "dev", "eth0")
    machine.plug_in()


@pytest.mark.timeout(120 + 200 * TIMES)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_survivors_stay_and_go_on_with_the_successor(how: signal.Signals, tmp_path: Path, weights: str) -> None:
    names = tmp_path / "names"
    names.write_text(f"{NAME} 10.77.0.10 0\n")
    options = {
        "prefix": f"rep{how:d}",
        "script_args": ("--steps", str(STEPS), "--pause", "0.05", "--timeout", "240"),
        "master": NAME,
    }
    environ = dict.fromkeys(range(NODES), REPLACED)
    options["most_starts"] = TIMES + 1
    cause = "stopped" if how == signal.SIGTERM else "node_lost"
    with fault_job.start_job(tmp_path / "run", environ=environ, **options) as job, name_server(job, names):
        began, best = time.time(), 0
        job.start()
        job.until(lambda: job.reached(1), "the first step", LIMIT_S)
        print(f"\nfirst start: {time.time() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
        for number, node in enumerate([1, 0] * TIMES, 1):
            job.until(lambda best=best: job.reached(best + 1), f"a step after {best}", LIMIT_S)
            survivor, old = job.processes[1 - node], {rank: job.pids(rank) for rank in WORLD}
            remove(job, node, how)
            address, created = f"10.77.0.{100 + number}", time.time()
            give_new_address(job, node, address)
            if node == 0:
                with names.open("a") as changes:
                    changes.write(f"{NAME} {address} {created + OLD_S}\n")
            best = max(step.step for rank in WORLD for step in job.steps(rank))
            job.start(node)
            job.until(lambda old=old: job.first_steps_of_new(old), f"replacement {number}", LIMIT_S)
            firsts = job.first_steps_of_new(old) or []
            took_s, lost = max(first.at for first in firsts) - created, max(0, best - firsts[0].step + 1)
            load = os.getloadavg()[0]
            print(f"| {how.name} | {node} | {number} | {took_s:.1f} | {lost} | {load:.1f} |")
            assert job.processes[1 - node] is survivor
            assert survivor.poll() is None
            if how == signal.SIGTERM:
                assert lost == 0
        job.until(lambda: job.reached(best + 1), f"a step after {best}")
        states = [job.state(node) for node in range(NODES)]
        assert [state.attempt for state in states if state] == [1 + 2 * TIMES] * NODES
        assert [counted("ddp_restarts_total", job.metrics(node)) for node in range(NODES)] == [{cause: 2 * TIMES}] * 2
        job.until(job.has_ended, "the end of the run", LIMIT_S)
        ends = [143 if how == signal.SIGTERM else 137] * TIMES
        assert [job.codes[node] for node in range(NODES)] == [[*ends, 0]] * NODES
        assert job.weights() == {str(rank): weights for rank in WORLD}


def test_of_two_node_0s_the_one_that_has_the_name_goes_on(tmp_path: Path, weights: str) -> None:
    """Node 0 is cut off, and replaced; then it is back."""
    names = tmp_path / "names"
    names.write_text(f"{NAME} 10.77.0.10 0\n")
    options = {
        "prefix": "reptwo",
        "script_args": ("--steps", str(STEPS), "--pause", "0.05", "--timeout", "240"),
        "master": NAME,
    }
    environ = dict.fromkeys(range(NODES), REPLACED)
    with fault_job.start_job(tmp_path / "run", spares=1, environ=environ, **options) as job, name_server(job, names):
        job.start()
        job.until(lambda: job.reached(1), "the first step", LIMIT_S)
        first, survivor, machines = job.processes.pop(0), job.processes[1], job.machines
        pids = {rank: job.pids(rank) for rank in WORLD}
        machines[0].cut()
        names.write_text(f"{NAME} {machines[2].address} 0\n")
        folders = {"DDP_RUN_DIR": str(tmp_path / "second"), "DDP_CHECKPOINT_DIR": str(job.folder / "checkpoints")}
        job.environ[0] = REPLACED | folders
        job.machines = (machines[2], machines[1])
        job.start(0)
        job.until(lambda: job.first_steps_of_new(pids), "the first step with the second node 0", LIMIT_S)
        assert first.poll() is None
        machines[0].plug_in()
        job.until(lambda: first.poll() is not None, "the end of the first node 0", LIMIT_S)
        outcome = job.outcome(0)
        assert outcome is not None
        assert (first.returncode, outcome.code, outcome.cause, outcome.node) == (137, 137, "node_lost", 0)
        assert job.processes[1] is survivor
        job.until(job.has_ended, "the end of the run", LIMIT_S)
        assert job.codes == {0: [0], 1: [0]}
        assert job.weights() == {str(rank): weights for rank in WORLD}
