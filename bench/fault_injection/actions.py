"""The faults, one function each. A function lets a job train, injects the fault, and records what is expected."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from lab import cgroup

from fault_injection.experiment import BOTH, Experiment
from fault_injection.job import PORT, RANKS_HERE, WORLD

JOIN_S = 6  # what the rows that lose a node for good give as --join-timeout
IMAGE = "train:2@sha256:a1"
NOBODY = [{}, {}]
EATER_BYTES = 1 << 30


def moment(experiment: Experiment) -> int:
    """Return the step at which a fault is injected. Enough steps remain after it to read the counters."""
    return experiment.dice.randint(1, 38)


def one_at(node: int, counts: dict[str, int]) -> list[dict[str, int]]:
    return [counts if other == node else {} for other in BOTH]


def rank_is_killed(experiment: Experiment) -> None:
    rank = experiment.dice.choice(WORLD)
    experiment.train_until(moment(experiment))
    time.sleep(experiment.dice.uniform(0, 0.1))
    experiment.now()
    os.kill(experiment.job.pids(rank)[-1], signal.SIGKILL)
    experiment.is_noticed(*BOTH)
    experiment.trains_again()
    exits = one_at(rank // RANKS_HERE, {"sigkill": 1})
    experiment.succeeds(codes=[[0], [0]], restarts=[{"killed": 1}] * 2, exits=exits)


def rank_fails(code: int, how: str) -> Callable[[Experiment], None]:
    def act(experiment: Experiment) -> None:
        experiment.train_until(14)
        experiment.job.until(lambda: len(experiment.job.steps(1)) == 14, "the last step of rank 1")
        experiment.now(experiment.job.steps(1)[-1].at)
        experiment.is_noticed(*BOTH)
        experiment.fails(f"rank 1 on node 0 {how}", code=code)

    return act


def agent_is_killed(node: int) -> Callable[[Experiment], None]:
    def act(experiment: Experiment) -> None:
        job = experiment.job
        experiment.train_until(moment(experiment))
        time.sleep(experiment.dice.uniform(0, 0.1))
        experiment.now()
        job.processes[node].kill()
        experiment.is_gone(job.machines[node].pids)
        job.tend_from_now()
        experiment.is_noticed(1 - node)
        experiment.trains_again()
        is_first = node == 0  # then the other has ended, too, and both begin again
        codes = [[137, 0], [137, 0] if is_first else [0]][:: 1 if is_first else -1]
        restarts = [{"requeue": 1} if is_first else {"node_lost": 1}, {"requeue": 1}]
        experiment.succeeds(codes=codes, restarts=restarts, exits=NOBODY)

    return act


def machine_is_lost(node: int) -> Callable[[Experiment], None]:
    """Return a fault like a power failure. The link goes down first, so that no connection is closed."""

    def act(experiment: Experiment) -> None:
        job = experiment.job
        experiment.train_until(moment(experiment))
        experiment.now()
        job.machines[node].cut()
        job.machines[node].kill()
        experiment.is_noticed(1 - node)
        job.machines[node].plug_in()
        job.tend_from_now()
        experiment.trains_again()
        is_first = node == 0
        codes = [[137, 0], [137, 0] if is_first else [0]][:: 1 if is_first else -1]
        restarts = [{"requeue": 1} if is_first else {"node_lost": 1}, {"requeue": 1}]
        experiment.succeeds(codes=codes, restarts=restarts, exits=NOBODY)

    return act


def machine_is_lost_for_good(experiment: Experiment) -> None:
    experiment.train_until(moment(experiment))
    experiment.now()
    experiment.job.machines[1].cut()
    experiment.job.machines[1].kill()
    experiment.is_noticed(0)
    experiment.fails(
        f"node 1 was lost: its ddprun stopped responding, and did not come back within {JOIN_S} s", code=137, nodes=[0]
    )


def cable_is_out(node: int, seconds: float) -> Callable[[Experiment], None]:
    """Return a network partition of ``seconds``. A node that ends during this time is started again."""

    def act(experiment: Experiment) -> None:
        job = experiment.job
        job.tended = True
        experiment.train_until(moment(experiment))
        experiment.now()
        job.machines[node].cut()
        experiment.is_noticed(*BOTH)
        job.until(lambda: experiment.passed_s() > seconds, "the cable")
        job.machines[node].plug_in()
        experiment.trains_again()
        # The node that is not node 0 ends, and comes back: node 0 keeps the store.
        ends = job.codes[1]
        restarts = [{"node_lost": 1}, {"requeue": len(ends)}]
        experiment.succeeds(codes=[[0], [*(137 for _ in ends), 0]], restarts=restarts, exits=NOBODY)

    return act


def cable_is_jolted(experiment: Experiment) -> None:
    """Cut the link for 2 s. TCP connections survive this."""
    experiment.train_until(moment(experiment))
    experiment.now()
    experiment.job.machines[1].cut()
    time.sleep(2.0)
    experiment.job.machines[1].plug_in()
    experiment.job.until(lambda: experiment.job.reached(40), "step 40")
    experiment.succeeds(codes=[[0], [0]], restarts=NOBODY, exits=NOBODY)


def link_is_slow(experiment: Experiment) -> None:
    """Limit the outgoing bandwidth of machine 1 to 2 Mbit/s. The training becomes slower, but it must not fail."""
    experiment.train_until(moment(experiment))
    experiment.now()
    bucket = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "2mbit", "burst", "32kb", "latency", "200ms")
    subprocess.run(experiment.job.machines[1].command(*bucket), check=True, timeout=10)
    experiment.job.until(lambda: experiment.job.reached(40), "step 40")
    experiment.succeeds(codes=[[0], [0]], restarts=NOBODY, exits=NOBODY)


def cable_stays_out(node: int) -> Callable[[Experiment], None]:
    def act(experiment: Experiment) -> None:
        experiment.train_until(moment(experiment))
        experiment.now()
        experiment.job.machines[node].cut()
        experiment.is_noticed(*BOTH)
        experiment.fails(
            (
                f"node 1 was lost: its ddprun stopped responding, and did not come back within {JOIN_S} s",
                "node 0, which has the store of the run, was lost: start the run again; a spare would take its place "
                "(--spares)",
            ),
            code=137,
        )

    return act


def rank_is_frozen(experiment: Experiment) -> None:
    rank = experiment.dice.choice(WORLD)
    experiment.train_until(moment(experiment))
    experiment.now()
    os.kill(experiment.job.pids(rank)[-1], signal.SIGSTOP)
    experiment.is_noticed(*BOTH)
    experiment.trains_again()
    exits = one_at(rank // RANKS_HERE, {"hang_killed": 1})
    experiment.succeeds(codes=[[0], [0]], restarts=[{"hang": 1}] * 2, exits=exits)
    kept = [len(list((experiment.job.folder / f"node-{node}").glob("stacks-attempt-1.txt"))) for node in BOTH]
    experiment.also("stacks kept", [1, 1], kept)


def port_is_taken(experiment: Experiment) -> None:
    job = experiment.job
    with job.beside(0, sys.executable, "-m", "http.server", PORT) as pid:
        time.sleep(2.0)
        experiment.now()
        job.start(0)
        job.until(lambda: job.has_ended(0), "the end of node 0")
        outcome = job.outcome(0)
        experiment.result = replace(experiment.result, ended_s=experiment.passed_s())
    who = f"by pid {pid} ({sys.executable} -m http.server {PORT})"[:80]
    message = f"port {PORT} on 10.77.0.10 is not available: address already in use {who}"
    experiment.also("codes", [[69], []], [job.codes[node] for node in BOTH])
    experiment.also("message", message, outcome.message[: len(message)] if outcome else None)
    experiment.is_gone()


def master_has_no_name(experiment: Experiment) -> None:
    experiment.job.master = "nosuch.invalid"
    experiment.now()
    experiment.job.start()
    reason = "'nosuch.invalid' does not resolve"
    # The resolver's reason: no network, no such name, or a name server that does not answer in time.
    experiment.fails((f"node-0: {reason}", f"node-1: {reason}"), code=69, ending=": [a-z ]+")


def master_is_another(experiment: Experiment) -> None:
    """Give the job a MASTER_ADDR that no machine has. Node 0 can report this. The other nodes can only wait."""
    experiment.job.master = "10.77.0.99"
    experiment.now()
    experiment.job.start(0)
    message = "10.77.0.99 is not an address of this machine, but node 0 must listen on it; "
    message += "this machine has 10.77.0.10 (eth0)"
    experiment.fails(message, code=69, nodes=[0])


def nodes_differ(difference: str, *homes: dict[str, str], image: str = "") -> Callable[[Experiment], None]:
    """Return a fault in which the nodes have different files in their homes, or node 1 has another image."""

    def act(experiment: Experiment) -> None:
        job = experiment.job
        job.environ = {0: {"DDP_IMAGE": IMAGE}, 1: {"DDP_IMAGE": image or IMAGE}}
        for node, files in enumerate(homes):
            job.home(node).mkdir()
            for name, text in files.items():
                (job.home(node) / name).write_text(text)
        experiment.now()
        job.start()
        experiment.fails(f"the nodes do not match: {difference}; make all nodes the same", code=78)

    return act


def rank_eats(experiment: Experiment) -> None:
    with cgroup("memory", {"memory.limit_in_bytes": str(EATER_BYTES)}) as enter:
        experiment.job.enter[1] = enter
        experiment.job.start()
        experiment.now()
        limit = f"the limit of its cgroup is {EATER_BYTES / (1 << 30):.3g} GiB"
        experiment.fails(
            f"rank 2 on node 1 ran out of memory and was killed: {limit}; "
            "give the job more memory, or each rank less work. A restart did not help",
            code=137,
        )
    outcomes = [experiment.job.outcome(node) for node in BOTH]
    result = [(outcome.cause, outcome.attempt, outcome.retry) if outcome else None for outcome in outcomes]
    experiment.also("cause, attempt, retry", [("oom", 2, False)] * 2, result)


def rank_is_killed_again_and_again(experiment: Experiment) -> None:
    experiment.now()
    experiment.job.start()
    each = "rank 1 on node 0 was killed by SIGKILL"
    failures = "; ".join(f"attempt {attempt}: {each}" for attempt in (2, 3, 4))
    experiment.fails(f"gave up after 3 attempts without progress ({failures})", code=75)
