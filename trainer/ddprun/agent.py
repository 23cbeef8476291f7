"""The agent of a node: torch elastic's loop, unmodified, with ranks, rendezvous and judgement of our own.

elastic calls: rendezvous, start, then monitor again and again until it is told of success or failure, then stop, and
the same anew while restarts are left. Monitor waits for the nodes' verdict, whose word it is whether one is left.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource  # type: ignore[attr-defined]

from ddprun import environment, memory, ports, rankfiles, stacks
from ddprun.agreement import Agreement
from ddprun.environment import Past, Place
from ddprun.errors import refused
from ddprun.logs import last_error
from ddprun.node import Node
from ddprun.ranks import KeeperLostError
from ddprun.recovery import Recovery
from ddprun.rendezvous import FixedRankRendezvous
from ddprun.verdict import Failure
from ddpwire import catalogue
from ddpwire.exits import Exit
from ddpwire.folder import HEARTBEAT, METRICS, rank_log, rank_metrics, stacks_of
from ddpwire.node import RankProcess
from ddpwire.outcome import Outcome

MONITOR_S = 0.25  # how often things are looked at that nobody tells of
WATCH_S = 0.02  # or, until ranks that were started again train
AT_ONCE_S = 0.001  # elastic's own pause; it must not be 0
DRAGGED_ALONG_S = 5.0  # peers of a failed rank sit in a collective that will never end
PROGRESS_S = 30.0
DEATHS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
EXIT_CAUSES = {0: "ok"} | {-number: number.name.lower() for number in DEATHS}


class NodeAgent(SimpleElasticAgent):
    """Brings up the ranks of one node, attempt after attempt, and ends with the outcome that all nodes share."""

    def __init__(self, node: Node, rendezvous: FixedRankRendezvous, agreement: Agreement) -> None:
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=node.contract.nproc,
                rdzv_handler=rendezvous,
                entrypoint=node.contract.command[0],
                max_restarts=node.contract.max_restarts,
                monitor_interval=AT_ONCE_S,
            )
        )
        self._node = node
        self._meeting = rendezvous
        self._agreement = agreement
        self._first_rank = 0
        self._num_succeeded = 0
        self._say_at = 0.0
        self._is_restart = False
        self._processes: tuple[RankProcess, ...] = ()
        self._recovery = Recovery(node.series, node.journal, node.step_before)
        self._started_at = 0.0
        self._waits_for_beat = False
        self.outcome: Outcome | None = None
        node.ranks.on_exit = self._on_exit
        node.ranks.say = node.journal.say
        node.ranks.on_plain = lambda why: node.journal.say(f"ranks are executed, which takes longer than a fork: {why}")
        node.ranks.on_keeper_lost = lambda: node.journal.say("the keeper of the ranks was killed, and they with it")

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        began = time.monotonic()
        self._node.series.state("restarting" if self._is_restart else "rendezvous")
        self._node.journal.update(state="rendezvous", attempt=self._meeting.attempt + 1)
        self._meeting.after = self.outcome
        try:
            super()._rendezvous(worker_group)
        except RuntimeError:  # torch's DistError: a store, or an answer in it, did not come
            raise refused(Exit.KILLED, "node_lost", "a node was lost while the ranks were being numbered") from None
        self._recovery.end_phase("rendezvous")
        took_s, met = time.monotonic() - began, len(self._meeting.members)
        self._node.journal.tell("rendezvous_done", seconds=took_s, nodes=met)
        self._agreement.begin(self._meeting.attempt, self._meeting.members)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node = self._node
        self._num_succeeded = 0
        self._first_rank = worker_group.workers[0].global_rank
        processes = []
        shutil.rmtree(node.node_dir / HEARTBEAT, ignore_errors=True)
        self._started_at, self._waits_for_beat = time.monotonic(), True
        past = Past(step=self._recovery.best, lost=node.losses.started(self._started_at))
        node.memory.killed()  # whoever it was, no rank of this attempt
        node.stop.new_attempt()
        with node.stop.starting:
            if node.stop.requested:
                self._agreement.fail(self._failure(self._first_rank, -node.stop.requested))
                return {}
            for worker in worker_group.workers:
                place = environment.place(worker_group, worker, node.contract.node_rank, self._meeting.attempt)
                if place.world_size == 1:
                    # On the attempt's own port the agent serves its store; a rank that is alone serves its own.
                    place = replace(place, master_port=ports.free(place.master_addr))
                processes.append(self._start_rank(place, past))
        self._processes = tuple(processes)
        node.pulse.follow(self._processes)
        self._recovery.started()
        world_size = worker_group.workers[0].world_size
        node.series.set(catalogue.WORLD_SIZE, world_size)
        node.series.set(catalogue.RANKS_ALIVE, len(node.ranks.alive))
        node.series.state("training")
        node.journal.update(state="stopping" if node.stop.requested else "training", ranks=self._processes)
        last = self._first_rank + len(processes) - 1
        which = f"rank {last}" if len(processes) == 1 else f"ranks {self._first_rank} to {last}"
        node.journal.say(f"{which} of {world_size} started (attempt {self._meeting.attempt})")
        took_s, self._started_at = time.monotonic() - self._started_at, time.monotonic()
        node.journal.tell("ranks_started", seconds=took_s, ranks=[one.rank for one in processes], world_size=world_size)
        return {process.local_rank: process.pid for process in processes}

    def _start_rank(self, place: Place, past: Past) -> RankProcess:
        node = self._node
        log, cores = node.node_dir / rank_log(place.rank), node.around.share.cores(place.local_rank)
        env = environment.of_rank(place, node.around, past, node.node_dir, node.environ)
        try:
            (node.node_dir / rank_metrics(place.rank)).mkdir(parents=True, exist_ok=True)
            rankfiles.begin(node.node_dir / rank_metrics(place.rank))
            (node.node_dir / HEARTBEAT).mkdir(exist_ok=True)
            output = node.logs.open(place.rank, log)
        except OSError as error:
            raise refused(Exit.CANNOT_WRITE, "internal", f"cannot write {error.filename}: {error.strerror}") from None
        try:
            pid = node.ranks.start(f"{place.attempt}.{place.local_rank}", node.contract.command, env, output, cores)
        except KeeperLostError as error:
            raise refused(Exit.KILLED, "killed", str(error)) from None
        finally:
            os.close(output)  # only the rank and its children write to it: its end is theirs
        memory.prefer(pid)
        return RankProcess(rank=place.rank, local_rank=place.local_rank, pid=pid, log=str(log))

    def _on_exit(self, tag: str, status: int) -> None:
        """A rank has ended, this instant. Called from the thread that listens to the keeper."""
        node = self._node
        attempt, local_rank = map(int, tag.split("."))
        rank = self._first_rank + local_rank
        failure = self._failure(rank, status)
        cause = "oom" if failure.oom else EXIT_CAUSES.get(status, "error" if status > 0 else "other")
        if verdict := self._agreement.verdict:
            is_hung = verdict.outcome.cause == "hang" and verdict.outcome.rank == rank
            cause = "hang_killed" if is_hung else "stopped" if status else "ok"
        # Before the nodes hear of it: the verdict is told by another thread, and the events are in order.
        node.journal.tell("rank_exited", rank=rank, cause=cause, status=status, step=failure.step)
        if not verdict and attempt == self._meeting.attempt:
            if status:
                self._recovery.failed(failure.step)
                self._agreement.fail(failure)
            else:
                self._num_succeeded += 1
                if self._num_succeeded == node.contract.nproc:
                    self._say_at = time.monotonic() + PROGRESS_S
                    self._agreement.done()
        rankfiles.put_gauges_aside(node.node_dir / METRICS, rank)
        node.series.count(catalogue.RANK_EXITS, cause=cause)
        node.series.set(catalogue.RANKS_ALIVE, len(node.ranks.alive))

    def _failure(self, rank: int, status: int) -> Failure:
        stop, kills = self._node.stop, self._node.memory
        return Failure(
            node=self._node.contract.node_rank,
            rank=rank,
            status=status,
            stopped_by=stop.requested or stop.passed_on,
            killed_here=stop.killed and status == -signal.SIGKILL,
            step=self._node.pulse.step(rank),
            stopped_for=self._node.pulse.stopped_for(rank),
            oom=kills.limit() if status == -signal.SIGKILL and kills.killed() else "",
            said=last_error(self._node.node_dir / rank_log(rank)) if status > 0 else "",
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        verdict = self._agreement.wait(WATCH_S if self._recovery.waits_for_step else MONITOR_S)
        self._hear_first_beat()
        self._recovery.steps(self._node.pulse.step(process.rank) for process in self._processes)
        if verdict is None:
            if self._num_succeeded == self._node.contract.nproc and time.monotonic() > self._say_at:
                self._say_at += PROGRESS_S
                self._node.journal.say("the ranks of this node are done; waiting for those of the others")
            return RunResult(state=WorkerState.HEALTHY)
        self.outcome = outcome = verdict.outcome
        self._node.logs.judge(outcome)
        if outcome.code == 0:
            self._node.ranks.clear()
            self._agreement.gone()
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(w.global_rank for w in worker_group.workers))
        self._recovery.failed(outcome.step)
        self._recovery.end_phase("detect")
        (journal := self._node.journal).tell_failure(outcome)
        self._is_restart, self._remaining_restarts = verdict.restart, int(verdict.restart)
        if verdict.restart:
            self._node.series.count(catalogue.RESTARTS, reason=outcome.cause)
            journal.say(f"attempt {self._meeting.attempt} failed: {outcome.message}; starting all ranks anew")
            journal.tell("restart", reason=outcome.cause)
        return RunResult(state=WorkerState.FAILED)

    def _hear_first_beat(self) -> None:
        if self._waits_for_beat and (beats := self._node.pulse.beats()):
            self._waits_for_beat = False
            first = min(beats.values(), key=lambda beat: beat.at_s)
            ago_s, took_s = time.monotonic() - first.at_s, first.at_s - self._started_at
            self._node.journal.tell("first_step", step=first.step, seconds=took_s, ago_s=ago_s)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        """End what is left of the attempt, with grace only where there is no hurry, and something to be saved."""
        node, outcome = self._node, self.outcome
        cause = outcome.cause if outcome else ""
        if cause == "hang":
            path = node.node_dir / stacks_of(self._meeting.attempt)
            stacks.keep(path, self._processes, node.ranks)
            node.journal.say(f"the stacks of this node's ranks are in {path}")
        if cause in ("hang", "node_lost") or self._is_restart:
            node.ranks.clear()
        else:
            node.journal.update(state="stopping")
            node.stop.end_ranks(node.contract.grace_s if cause == "stopped" else DRAGGED_ALONG_S)
        node.logs.forget(in_a_hurry=self._is_restart)
        self._recovery.end_phase("teardown")
        node.losses.ended(time.monotonic(), hung=cause == "hang", beats=node.pulse.beats().values())
        self._agreement.gone()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._node.ranks.clear()

    def _exit_barrier(self) -> None:
        """Nothing to wait for: that all nodes succeeded is what they agreed on."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """An event without the host's full name: elastic's own asks DNS for it each time, which can hang."""
        return Event(f"ddprun.{state}", source)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:  # noqa: ARG002
        """Nobody reads elastic's durations."""
        yield
