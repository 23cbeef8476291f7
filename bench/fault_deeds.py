"""The faults, one function each: it lets a job train, does it harm, and says what must come of it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fault_job import PORT, RANKS_HERE, WORLD
from fault_story import BOTH, Story

JOIN_S = 6  # what the rows that lose a node for good give as --join-timeout
IMAGE = "train:2@sha256:a1"
NOBODY = [{}, {}]
GROUPS = Path("/sys/fs/cgroup/memory")
EATER_BYTES = 1 << 30


def moment(story: Story) -> int:
    return story.dice.randint(12, 26)


def one_at(node: int, what: dict[str, int]) -> list[dict[str, int]]:
    return [what if other == node else {} for other in BOTH]


def rank_is_killed(story: Story) -> None:
    rank = story.dice.choice(WORLD)
    story.train_until(moment(story))
    time.sleep(story.dice.uniform(0, 0.1))
    story.now()
    os.kill(story.job.pids(rank)[-1], signal.SIGKILL)
    story.is_noticed(*BOTH)
    story.trains_again()
    exits = one_at(rank // RANKS_HERE, {"sigkill": 1})
    story.succeeds(codes=[[0], [0]], restarts=[{"killed": 1}] * 2, exits=exits)


def rank_fails(code: int, how: str) -> Callable[[Story], None]:
    def act(story: Story) -> None:
        story.train_until(14)
        story.job.until(lambda: len(story.job.steps(1)) == 14, "the last step of rank 1")
        story.now(story.job.steps(1)[-1].at)
        story.is_noticed(*BOTH)
        story.fails(f"rank 1 on node 0 {how}", code=code)

    return act


def agent_is_killed(node: int) -> Callable[[Story], None]:
    def act(story: Story) -> None:
        job = story.job
        story.train_until(moment(story))
        time.sleep(story.dice.uniform(0, 0.1))
        story.now()
        job.processes[node].kill()
        story.is_gone(job.machines[node].pids)
        job.tend_from_now()
        story.is_noticed(1 - node)
        story.trains_again()
        is_first = node == 0  # then the other has ended, too, and both begin anew
        codes = [[137, 0], [137, 0] if is_first else [0]][:: 1 if is_first else -1]
        story.succeeds(codes=codes, restarts=NOBODY if is_first else one_at(0, {"node_lost": 1}), exits=NOBODY)

    return act


def machine_is_lost(node: int) -> Callable[[Story], None]:
    """Its cable first, so that no connection is closed: as when its power fails."""

    def act(story: Story) -> None:
        job = story.job
        story.train_until(moment(story))
        story.now()
        job.machines[node].cut()
        job.machines[node].kill()
        story.is_noticed(1 - node)
        job.machines[node].plug_in()
        job.tend_from_now()
        story.trains_again()
        is_first = node == 0
        codes = [[137, 0], [137, 0] if is_first else [0]][:: 1 if is_first else -1]
        story.succeeds(codes=codes, restarts=NOBODY if is_first else one_at(0, {"node_lost": 1}), exits=NOBODY)

    return act


def machine_is_lost_for_good(story: Story) -> None:
    story.train_until(moment(story))
    story.now()
    story.job.machines[1].cut()
    story.job.machines[1].kill()
    story.is_noticed(0)
    story.fails(f"node 1 was lost: its ddprun fell silent, and did not come back in {JOIN_S} s", code=137, nodes=[0])


def cable_is_out(node: int, seconds: float) -> Callable[[Story], None]:
    """For so long; who ended meanwhile is started again, as often as a scheduler does."""

    def act(story: Story) -> None:
        job = story.job
        job.tended = True
        story.train_until(moment(story))
        story.now()
        job.machines[node].cut()
        story.is_noticed(*BOTH)
        job.until(lambda: story.passed_s() > seconds, "the cable")
        job.machines[node].plug_in()
        story.trains_again()
        # The node that is not node 0 ends, and comes back: node 0 keeps the store.
        ends = job.codes[1]
        story.succeeds(codes=[[0], [*(137 for _ in ends), 0]], restarts=[{"node_lost": 1}, {}], exits=NOBODY)

    return act


def cable_is_jolted(story: Story) -> None:
    """Out for 2 s, which TCP survives."""
    story.train_until(moment(story))
    story.now()
    story.job.machines[1].cut()
    time.sleep(2.0)
    story.job.machines[1].plug_in()
    story.job.until(lambda: story.job.reached(40), "step 40")
    story.succeeds(codes=[[0], [0]], restarts=NOBODY, exits=NOBODY)


def cable_stays_out(node: int) -> Callable[[Story], None]:
    def act(story: Story) -> None:
        story.train_until(moment(story))
        story.now()
        story.job.machines[node].cut()
        story.is_noticed(*BOTH)
        story.fails(
            (
                f"node 1 was lost: its ddprun fell silent, and did not come back in {JOIN_S} s",
                "node 0 was lost, and with it the store of the run: start the run again",
            ),
            code=137,
        )

    return act


def rank_is_frozen(story: Story) -> None:
    rank = story.dice.choice(WORLD)
    story.train_until(moment(story))
    story.now()
    os.kill(story.job.pids(rank)[-1], signal.SIGSTOP)
    story.is_noticed(*BOTH)
    story.trains_again()
    exits = one_at(rank // RANKS_HERE, {"hang_killed": 1})
    story.succeeds(codes=[[0], [0]], restarts=[{"hang": 1}] * 2, exits=exits)
    kept = [len(list((story.job.folder / f"node-{node}").glob("stacks-attempt-1.txt"))) for node in BOTH]
    story.also("stacks kept", [1, 1], kept)


def port_is_taken(story: Story) -> None:
    job = story.job
    with job.beside(0, sys.executable, "-m", "http.server", PORT) as pid:
        time.sleep(2.0)
        story.now()
        job.start(0)
        job.until(lambda: job.has_ended(0), "the end of node 0")
        outcome = job.outcome(0)
        story.told = replace(story.told, ended_s=story.passed_s())
    who = f"by pid {pid} ({sys.executable} -m http.server {PORT})"[:80]
    message = f"port {PORT} on 10.77.0.10 cannot be had: address already in use {who}"
    story.also("codes", [[69], []], [job.codes[node] for node in BOTH])
    story.also("message", message, outcome.message[: len(message)] if outcome else None)
    story.is_gone()


def master_has_no_name(story: Story) -> None:
    story.job.master = "nosuch.invalid"
    story.now()
    story.job.start()
    why = "nosuch.invalid does not resolve: temporary failure in name resolution"
    story.fails((f"node-0: {why}", f"node-1: {why}"), code=69)


def master_is_another(story: Story) -> None:
    """The address of no machine of the job: node 0 can say so; the others can only wait for it."""
    story.job.master = "10.77.0.99"
    story.now()
    story.job.start(0)
    what = "10.77.0.99 is no address of this machine, which has to listen there; it has 10.77.0.10 (eth0)"
    story.fails(what, code=69, nodes=[0])


def nodes_differ(what: str, *homes: dict[str, str], image: str = "") -> Callable[[Story], None]:
    """The nodes find other files in their homes, or node 1 is of another image."""

    def act(story: Story) -> None:
        job = story.job
        job.environ = {0: {"DDP_IMAGE": IMAGE}, 1: {"DDP_IMAGE": image or IMAGE}}
        for node, files in enumerate(homes):
            job.home(node).mkdir()
            for name, text in files.items():
                (job.home(node) / name).write_text(text)
        story.now()
        job.start()
        story.fails(f"the nodes do not match: {what}; give all the same", code=78)

    return act


def rank_eats(story: Story) -> None:
    with memory_group(EATER_BYTES) as enter:
        story.job.enter[1] = enter
        story.job.start()
        story.now()
        what = f"its cgroup has {EATER_BYTES / (1 << 30):.3g} GiB"
        story.fails(
            f"rank 2 on node 1 was killed for memory: {what}; give the job more, or each rank less to do (again)",
            code=137,
        )
    outcomes = [story.job.outcome(node) for node in BOTH]
    told = [(outcome.cause, outcome.attempt, outcome.retry) if outcome else None for outcome in outcomes]
    story.also("cause, attempt, retry", [("oom", 2, False)] * 2, told)


def rank_is_killed_again_and_again(story: Story) -> None:
    story.now()
    story.job.start()
    each = "rank 1 on node 0 was killed by SIGKILL"
    what = "; ".join(f"attempt {attempt}: {each}" for attempt in (2, 3, 4))
    story.fails(f"gave up after 3 attempts without progress: {what}", code=75)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Callable[[], None]]:
    """A memory cgroup (v1) of so many bytes; what is yielded makes the calling process enter it. Raises OSError."""
    group = GROUPS / f"faults-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)
