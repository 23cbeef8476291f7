"""A controller replaces the nodes of a run: namespaces stand for pods, each with a new address after its loss.

Node 0's name answers late, and for a while with the address of the node 0 before. The nodes that are left keep their
ddprun.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lab
from fault_injection import job as fault_job
from fault_injection.experiment import counted
from fault_injection.job import NODES, WORLD, Job

MISSING = (
    ""
    if os.geteuid() == 0 and shutil.which("ip") and Path("/proc/self/ns/net").exists()
    else "needs root on Linux, and ip (apt install iproute2): nodes are network namespaces"
)
NAME, NAME_SERVER = "run-0.pods", "10.77.0.1"
LIMIT_S = 240.0
LATE_S, OLD_S = 1.0, 5.0  # how late the name answers, and for how long with the old address
REPLACED = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "DDP_NODE_REPLACED": "1"}
SERVER = Path(__file__).parent / "scripts" / "name_server.py"


def script_args(steps: int, pause_s: float = 0.05) -> tuple[str, ...]:
    return ("--steps", str(steps), "--pause", str(pause_s), "--timeout", "240")


def undisturbed(folder: Path, steps: int) -> str:
    """Return the weights of a run of so many steps that nothing disturbs."""
    with fault_job.start_job(folder, prefix="calm", script_args=script_args(steps, 0)) as job:
        job.start()
        job.until(job.has_ended, "the end of an undisturbed run", LIMIT_S)
        (weights,) = set(job.weights().values())
        return weights


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


def replace_nodes(how: signal.Signals, replaced: list[int], steps: int, folder: Path, weights: str) -> None:
    """Train, replace these nodes one after the other, and train to the end.

    The survivor's ddprun stays, no step is lost after a SIGTERM, the counters name the cause, and the weights are those
    of an undisturbed run. ``replaced`` has each node equally often. A table of all replacements is printed.
    """
    names = folder / "names"
    names.write_text(f"{NAME} 10.77.0.10 0\n")
    options = {
        "prefix": f"rep{how:d}",
        "script_args": script_args(steps),
        "master": NAME,
    }
    environ = dict.fromkeys(range(NODES), REPLACED)
    times = len(replaced) // NODES
    options["most_starts"] = times + 1
    cause = "stopped" if how == signal.SIGTERM else "node_lost"
    with fault_job.start_job(folder / "run", environ=environ, **options) as job, name_server(job, names):
        began, best = time.time(), 0
        job.start()
        job.until(lambda: job.reached(1), "the first step", LIMIT_S)
        print(f"\nfirst start: {time.time() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
        for number, node in enumerate(replaced, 1):
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
        assert [state.attempt for state in states if state] == [1 + 2 * times] * NODES
        assert [counted("ddp_restarts_total", job.metrics(node)) for node in range(NODES)] == [{cause: 2 * times}] * 2
        job.until(job.has_ended, "the end of the run", LIMIT_S)
        ends = [143 if how == signal.SIGTERM else 137] * times
        assert [job.codes[node] for node in range(NODES)] == [[*ends, 0]] * NODES
        assert job.weights() == {str(rank): weights for rank in WORLD}
