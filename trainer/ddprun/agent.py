"""The node agent: torch elastic's agent loop with ddprun's own ranks, rendezvous and restart policy.

In each attempt, torch elastic calls ``_rendezvous`` and ``_start_workers``. Then it calls ``_monitor_workers`` until
that method returns success or failure. After a failure it calls ``_stop_workers``, and starts another attempt.
``_monitor_workers`` waits for node 0's decision, which ends the attempt on all nodes. The decision also says whether
the ranks are restarted.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource  # type: ignore[attr-defined]

from ddprank.resume import RESUME_SUFFIX
from ddprun.files.checkpoint_copies import CheckpointCopies, start_copies
from ddprun.files.node_dir import last_checkpoint
from ddprun.health import heartbeat_monitor
from ddprun.health.diagnosis import Diagnosis
from ddprun.health.heartbeat_monitor import HeartbeatMonitor, SpawnWatch
from ddprun.health.resumes import Resume, describe_differences, find_differences
from ddprun.metrics import metrics
from ddprun.metrics.metrics import NodeSeries, RankSeries
from ddprun.metrics.recovery import Recovery
from ddprun.nodes.consensus import Consensus
from ddprun.nodes.preflight import StartedNode
from ddprun.nodes.rendezvous import FixedRankRendezvous
from ddprun.output.logs import RankLogs
from ddprun.output.progress import Progress
from ddprun.output.rank_errors import NO_STDIN, last_error
from ddprun.ranks import rank_environment, termination
from ddprun.ranks.process_groups import GUIDE
from ddprun.ranks.termination import OomMonitor, Stop
from ddprun.ranks.workers import SupervisorLostError
from ddprun.system import network, processes
from ddprun.system.errors import NodeError, config_error, node_error
from ddprun.system.restart_policy import FailedAttempt, Failure
from ddprun.system.stores import StoreError
from ddpwire import metrics as ddpwire_metrics
from ddpwire import run_files
from ddpwire.exits import STOPPED, Exit, of_status
from ddpwire.run_files import Outcome, RankProcess

MONITOR_S = 0.25  # between two reads of the ranks' heartbeats, as often as node 0 gets them; a decision ends the wait
RECOVERY_MONITOR_S = 0.02  # the same between a restart and its first step, whose time is measured to this precision
ELASTIC_INTERVAL_S = 0.001  # torch elastic's pause between calls of _monitor_workers, which waits itself; not 0
PEER_GRACE_S = 5.0  # short: after a failure, the other ranks wait in a collective that never ends
PROGRESS_INTERVAL_S = 30.0  # of lines that this node's ranks have ended; those of other nodes may train for hours
NO_GROUP_S = 20.0  # most scripts create their process group earlier, because torch is imported already
GIVE_UP_S = 1.0  # for the other nodes to hear why this one ends
# A metric has a series for each cause, so causes are few. Deaths by other signals are "other".
DEATHS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
EXIT_CAUSES = {0: "ok"} | {-number: number.name.lower() for number in DEATHS}


@dataclass(frozen=True, kw_only=True)
class NodeContext(StartedNode):
    """The settings and objects that a ``NodeAgent`` uses."""

    stop: Stop
    logs: RankLogs
    series: NodeSeries
    rank_series: RankSeries
    heartbeats: HeartbeatMonitor
    oom_monitor: OomMonitor


class NodeAgent(SimpleElasticAgent):
    """Runs the ranks of one node, and restarts them until node 0 decides that the run ends."""

    def __init__(self, node: NodeContext, rendezvous: FixedRankRendezvous) -> None:
        super().__init__(
            WorkerSpec(
                role=node.config.role,  # torch elastic numbers ROLE_RANK among the nodes with the same role
                local_world_size=node.config.local_world_size,
                rdzv_handler=rendezvous,
                entrypoint=node.config.command[0],  # only for torch elastic's log, which asserts that there is one
                max_restarts=sys.maxsize,  # node 0 decides how often
                monitor_interval=ELASTIC_INTERVAL_S,
            )
        )
        self._node = node
        self._rendezvous_handler = rendezvous
        self.consensus = self._start_consensus()
        self._first_rank = 0
        self._num_succeeded = 0
        self._log_at = 0.0  # when to log next that this node's ranks have ended
        self._is_restart = False
        self._processes: tuple[RankProcess, ...] = ()
        self._recovery = Recovery(node.series, node.journal, node.folder.previous_step)
        self._started_at = 0.0
        self._waits_for_heartbeat = self._waits_for_resumes = False
        self._world_size = 1
        self.outcome: Outcome | None = None
        self._reported_no_group = False
        self._spawn_watch: SpawnWatch | None = None
        self._diagnosis = Diagnosis(node.folder.path, node.config.node_rank, node.folder.runtime, node.files)
        node.workers.on_exit = self._on_exit
        # Not a bound method: the consensus is another one after node 0 was replaced.
        node.stop.on_leave = lambda: self.consensus.post_leaving()
        node.workers.on_supervisor_lost = self._report_lost_supervisor
        node.workers.on_give_up = self._report_give_up
        self.copies = self._start_copies()

    def _report_lost_supervisor(self) -> None:
        if not self._node.stop.requested:  # during a stop, the supervisor ends with the ranks
            self._node.journal.log("the supervisor of the ranks was killed, so the ranks were killed too")

    def _report_give_up(self, error: NodeError) -> None:
        """Tell the other nodes why this node ends its ranks; else they would see only that it is gone."""
        node, rank = self._node.config.node_rank, self._first_rank  # a failure without a rank means a lost node
        self.consensus.post_failure(Failure(node=node, rank=rank, status=error.code, refused=str(error)))
        self.consensus.wait(GIVE_UP_S)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        began = time.monotonic()
        # The metric tells restarts from the first rendezvous; node.json has one state for both.
        self._node.series.state("restarting" if self._is_restart else "rendezvous")
        self._node.journal.update(state="rendezvous", attempt=self._rendezvous_handler.attempt + 1)  # counted below
        self._rendezvous_handler.previous_outcome = self.outcome  # after a failure, nodes may be missing for good
        is_first = not self._rendezvous_handler.attempt  # before join_anew, which sets the attempt to 0
        is_store_lost = self.consensus.node_0_lost
        while True:
            # Then only this node ends. After any other stop, _gives_up_start tells all nodes.
            if self._node.stop.leaves:
                self._node.stop.check()
            try:
                if is_store_lost and self._node.config.replaces_node_0:
                    self._rendezvous_handler.join_anew()
                    self._node.journal.update(master=self._rendezvous_handler.master)
                    if self.copies:  # they use the store of the lost node 0
                        self.copies.close()
                    self.copies = self._start_copies(self._node.route.own)
                    self.consensus = self._start_consensus(self.consensus.history)  # the new store has none
                super()._rendezvous(worker_group)
                break
            except StoreError:  # a store, or a key in it, did not appear in time; another RuntimeError is a bug
                if not self._node.config.replaces_node_0:
                    message = "a node was lost during the rendezvous"
                    raise node_error(Exit.KILLED, "node_lost", message) from None
                is_store_lost = self._rendezvous_handler.is_store_lost()  # else meet again in the same store
        # A signal writes "stopping" into the journal before it sets ``requested`` (bringup.py),
        # and "starting" must not replace it.
        is_stopping = self._node.stop.requested or self._node.journal.state.state == "stopping"
        state = "stopping" if is_stopping else "starting"  # a rank may wait for the import of torch
        failure = self.outcome.message if self.outcome else ""
        # resumed_apart was about the ranks of the previous attempt.
        self._node.journal.update(
            state=state, attempt=self._rendezvous_handler.attempt, last_failure=failure, resumed_apart=""
        )
        if is_first and state == "starting":  # else the metric says "restarting" until the ranks train
            self._node.series.state(state)
        self._recovery.end_phase("rendezvous")
        took_s, num_nodes = time.monotonic() - began, len(self._rendezvous_handler.members)
        self._node.journal.emit("rendezvous_done", seconds=took_s, nodes=num_nodes)
        self.consensus.begin_attempt(self._rendezvous_handler.attempt, self._rendezvous_handler.members)
        for ended in self.consensus.history:
            self._recovery.reached(ended.step)  # a node that joined later needs it to count lost steps
            if is_first and self._node.folder.previous_step is None:  # else an earlier ddprun here has counted them
                self._node.series.count(ddpwire_metrics.RESTARTS, reason=ended.outcome.cause)

    def _start_consensus(self, history: Sequence[FailedAttempt] = ()) -> Consensus:
        """``history``: the attempts that failed under a previous node 0."""
        return Consensus(
            self._rendezvous_handler.control,
            self._node.config,
            read_statuses=self._node.heartbeats.statuses,
            requeues=self._node.folder.requeues,
            describe_success=self._describe_success,
            on_resumes=self._report_resumes,
            history=history,
        )

    def _start_copies(self, offers_at: str = "") -> CheckpointCopies | None:
        """Copy checkpoints from node 0 to other nodes, if the job wants it. Raises NodeError.

        ``offers_at``: the address at which this node offers its copy to a new node 0.
        """
        node, rendezvous = self._node, self._rendezvous_handler
        # The members are a function, because they change with each attempt.
        address, store, is_new = rendezvous.address, rendezvous.control, rendezvous.is_elected
        return start_copies(node, address, store, lambda: rendezvous.members, offers_at=offers_at, is_new=is_new)

    def _gives_up(self) -> bool:
        """Return whether the ranks of this attempt need not start any more."""
        return bool(self._node.stop.requested or self.consensus.decision)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this node's ranks, after node_setup, which may make their folders. Return their pids."""
        node = self._node
        self._num_succeeded = 0
        self._first_rank = worker_group.workers[0].global_rank
        processes = []
        if not self._set_up():
            return {}  # without ranks, _monitor_workers waits for the decision
        if self.copies:  # the ranks may load the copy as soon as they run
            self.copies.fill(self._rendezvous_handler.attempt, self._gives_up)
        try:
            node.folder.runtime.begin_attempt()
            node.heartbeats.forget()  # only now: other threads would open the old files again
        except OSError as error:
            raise node_error(Exit.CANNOT_WRITE, "internal", f"the ranks' state cannot be kept: {error}") from None
        # Other programs find the folder through node.json. It moves if its parent has vanished.
        if node.folder.runtime.path != Path(node.journal.state.runtime):
            node.journal.update(runtime=str(node.folder.runtime.path))
        self._started_at, self._waits_for_heartbeat = time.monotonic(), True
        self._world_size = world_size = worker_group.workers[0].world_size
        self._waits_for_resumes = world_size > 1  # a single rank cannot differ from another one
        self._check_world_size()  # before any rank runs, because it may raise
        lost = node.downtime.started(self._started_at)  # for the ranks' environment: they report the goodput
        node.oom_monitor.killed()  # forget kills from before this attempt
        node.stop.new_attempt()
        # A stop that is requested from here on waits for this lock, and then signals all of the ranks.
        with node.stop.starting:
            if self._gives_up_start():
                return {}
            for worker in worker_group.workers:
                if worker.world_size == 1:
                    # The agent's store uses the group's port; a single rank's own store needs another port.
                    worker_group.master_port = network.free_port(str(worker_group.master_addr))  # type: ignore[assignment]
                try:
                    processes.append(self._start_rank(worker_group, worker, lost))
                except SupervisorLostError as error:
                    if node.workers.alive:  # the supervisor did not report how these ranks ended
                        raise node_error(Exit.KILLED, "killed", str(error)) from None
                    return {}  # the exits of the ranks have been posted
        self._processes = tuple(processes)
        node.heartbeats.track(self._processes)
        # Forked ranks check this themselves (process_groups.py), and a node's only rank may start ranks of its own.
        # While a user debugs a rank, ranks may wait as long as they like (so hang_timeout_s is 0 by default then).
        is_watched = not node.workers.forks and node.config.debug_rank is None and len(processes) > 1
        self._spawn_watch = SpawnWatch(self._processes) if is_watched else None
        self._diagnosis.track(self._processes, self._rendezvous_handler.attempt)
        self._recovery.started()
        # Set both counts, because ranks may have ended already.
        node.series.set(ddpwire_metrics.RANKS_ALIVE, len(node.workers.alive))
        node.series.set(ddpwire_metrics.RANKS_DONE, self._num_succeeded)
        node.series.set(ddpwire_metrics.WORLD_SIZE, world_size)
        node.series.state("training")
        # A stop that was requested since has written "stopping", which "training" must not replace.
        node.journal.update(state="stopping" if node.stop.requested else "training", ranks=self._processes)
        last = self._first_rank + len(processes) - 1
        which = f"rank {last}" if len(processes) == 1 else f"ranks {self._first_rank} to {last}"
        node.journal.log(f"{which} of {world_size} started (attempt {self._rendezvous_handler.attempt})")
        # From here on, _started_at is when the ranks had started: first_step and NO_GROUP_S count from it.
        took_s, self._started_at = time.monotonic() - self._started_at, time.monotonic()
        node.journal.emit(
            "ranks_started", seconds=took_s, ranks=[process.rank for process in processes], world_size=world_size
        )
        return {process.local_rank: process.pid for process in processes}

    def _check_world_size(self) -> None:
        """If all nodes have joined, the number of ranks of the run is known. Raises NodeError."""
        config, last = self._node.config, self._world_size - 1
        if len(self._rendezvous_handler.members) == config.max_nodes:
            self._node.series.set(ddpwire_metrics.WORLD_SIZE_EXPECTED, self._world_size)
            if config.debug_rank is not None and config.debug_rank > last:
                raise config_error(f"--debug-rank is {config.debug_rank}: expected a rank of this run (0 to {last})")

    def _set_up(self) -> bool:
        """Run this node's node_setup, and wait for that of the other nodes. Return whether the ranks can start."""
        node, rendezvous, number = self._node, self._rendezvous_handler, self._node.config.node_rank
        done = [f"{rendezvous.attempt}/set-up/{member}" for member in rendezvous.members]
        progress = Progress(node.journal.log, "waiting for node_setup of the other nodes")
        failure, code = node.commands.set_up(gives_up=self._gives_up)
        if failure and not self._gives_up():  # else the stop or the decision has ended the command
            self.consensus.post_failure(Failure(node=number, rank=None, status=code, setup=failure))
        try:
            if not failure and len(done) > 1:  # a single node waits for nobody
                # Also without a node_setup here: nodes that have one wait for this key of each node.
                rendezvous.control.set(f"{rendezvous.attempt}/set-up/{number}", "")
                while node.config.node_setup and not rendezvous.control.check(done) and not self._gives_up():
                    progress.update()
                    self.consensus.wait(MONITOR_S)  # not a sleep: a decision ends it
        except StoreError:  # the consensus notices, too, that node 0 is lost
            return False
        # After a stop, _start_workers goes on to _gives_up_start, which tells the other nodes.
        return bool(node.stop.requested) or not (failure or self.consensus.decision)

    def _start_rank(self, group: WorkerGroup, worker: Worker, lost: str) -> RankProcess:
        node, attempt = self._node, self._rendezvous_handler.attempt
        rank, local_rank = worker.global_rank, worker.local_rank
        log = node.folder.path / run_files.rank_log(rank)
        metrics_dir = node.folder.runtime.path / run_files.rank_metrics(rank)
        env = rank_environment.rank_environment(
            group, worker, node, node.environ, attempt=attempt, steps_before=self._recovery.best, lost=lost,
            spent=node.rank_series.spent_s(str(rank)), threads=node.resources.threads, interface=node.route.interface,
        )  # fmt: skip
        try:
            metrics_dir.mkdir(parents=True, exist_ok=True)  # after a restart it exists: counters go on, gauges not
            metrics.prepare_rank_dir(metrics_dir)
            # The error of the previous attempt, if any (True: missing_ok). Another process deletes it, because the disk
            # may not answer.
            node.files.call((node.folder.path / run_files.rank_error(rank)).unlink, True)
            streams = node.logs.open(rank, local_rank, log)
        except OSError as error:
            message = f"cannot write {error.filename}: {error.strerror}"
            raise node_error(Exit.CANNOT_WRITE, "internal", message) from None
        try:
            cores = node.resources.cores(local_rank)
            # The supervisor may import for minutes before it answers. After a stop, the other nodes are told meanwhile.
            gives_up, tag = self._gives_up_start, f"{attempt}.{local_rank}"
            pid = node.workers.start(tag, node.config.command, env, streams, cores, gives_up)
        finally:
            for descriptor in streams:
                os.close(descriptor)  # so that the streams end when the rank and its children end
        termination.prefer_as_oom_victim(pid)  # else the kernel might kill ddprun, and with it the whole node
        return RankProcess(rank=rank, local_rank=local_rank, pid=pid, log=str(log))

    def _gives_up_start(self) -> bool:
        """Return whether a stop was requested. If it was, tell all nodes that this node starts no ranks."""
        if number := self._node.stop.requested:
            node, reason = self._node.config.node_rank, self._node.stop.reason
            self.consensus.post_failure(
                Failure(node=node, rank=None, status=-number, stopped_by=number, stop_reason=reason, unstarted=True)
            )
        return bool(number)

    def _was_stopped(self, rank: int) -> bool:
        """Return whether a requested stop made this rank exit with 0 before its training was complete."""
        requested = self._node.stop.requested
        if requested == signal.SIGINT:  # the outcome is then 130, whatever the ranks do (docs/decisions/0027)
            return True
        # If a rank exited with 0 before the stop, the training had reached its end.
        return requested != 0 and not self._num_succeeded and not self._node.heartbeats.beat(rank).is_complete

    def _on_exit(self, tag: str, status: int) -> None:
        node = self._node
        attempt, local_rank = map(int, tag.split("."))
        rank = self._first_rank + local_rank
        failure = self._failure(rank, status)
        cause = "oom" if failure.oom else EXIT_CAUSES.get(status, "error" if status > 0 else "other")
        if decision := self.consensus.decision:  # from now on, ddprun itself ends the ranks
            is_hung = decision.outcome.cause == "hang" and decision.outcome.rank == rank
            cause = "hang_killed" if is_hung else "stopped" if status else "ok"
        elif failure.stopped_by and of_status(status) in STOPPED:  # the rank ended because of the requested stop
            cause = "stopped"
        # Emit this before the failure is posted: another thread logs the decision, and events must be in order.
        node.journal.emit("rank_exited", rank=rank, cause=cause, status=status, step=failure.step)
        # A rank that was stuck in the kernel when it was killed may end during a later attempt.
        if not decision and attempt == self._rendezvous_handler.attempt:
            if status or self._was_stopped(rank):
                self._recovery.failed(failure.step)  # the recovery is measured from here, not from the decision
                self.consensus.post_failure(failure)
            else:
                self._num_succeeded += 1
                self._log_at = time.monotonic() + PROGRESS_INTERVAL_S  # no line if the other ranks end soon after
                is_last = self._num_succeeded == node.config.local_world_size
                self.consensus.post_success(rank, is_last=is_last)
        node.series.count(ddpwire_metrics.RANK_EXITS, cause=cause)
        # Set RANKS_DONE first: a scrape between the two calls must not miss a rank.
        node.series.set(ddpwire_metrics.RANKS_DONE, self._num_succeeded)
        node.series.set(ddpwire_metrics.RANKS_ALIVE, len(node.workers.alive))

    def _failure(self, rank: int, status: int) -> Failure:
        stop, kills, logs = self._node.stop, self._node.oom_monitor, self._node.logs
        # The traceback of an executed rank is in its log, or is still being written there; a forked one writes a file.
        if status == 1 and not self._node.workers.forks:
            logs.catch_up(rank)
        start, in_order = logs.starts[rank], logs.in_order
        where = (self._node.folder.path, rank, status, start, in_order)
        # A rank that a signal killed has reported no error. If the disk does not answer, the report goes without it.
        error = self._node.files.read(last_error, *where, unknown="") if status > 0 else ""
        if NO_STDIN.search(error) and not self._node.config.reads_stdin(rank):
            error += f" (this rank has no stdin: use ddprun --debug-rank {rank} to connect it to this terminal)"
        beat = self._node.heartbeats.beat(rank)
        return Failure(
            node=self._node.config.node_rank,
            rank=rank,
            status=status,
            stopped_by=stop.requested or stop.forwarded,  # a forwarded signal (SIGUSR1) may end a rank, too
            stop_reason=stop.reason,
            killed_here=stop.killed and status == -signal.SIGKILL,  # else it ended just before the kill
            stopped_again=stop.requested_again,
            step=beat.step,
            stopped_for=beat.stopped_for,
            # Only after SIGKILL, the kernel's signal: killed() forgets the kills that it returns.
            oom=kills.limit() if status == -signal.SIGKILL and kills.killed() else "",
            error=error,
        )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Short after a restart: the recovery's time and lost steps are those of the first step that this loop sees.
        decision = self.consensus.wait(RECOVERY_MONITOR_S if self._recovery.waits_for_step else MONITOR_S)
        self._node.workers.continue_supervisor()  # stopped, it would report no exit
        self._report_first_heartbeat()
        self._recovery.steps(self._node.heartbeats.beat(process.rank).step for process in self._processes)
        if decision is None:
            if self._node.stop.requested:
                self._record_rank_states()
            if self._num_succeeded == self._node.config.local_world_size and time.monotonic() > self._log_at:
                self._log_at += PROGRESS_INTERVAL_S
                self._node.journal.log(
                    "all ranks of this node have exited with 0; waiting for the ranks of other nodes"
                )
            self._report_no_group()
            self._post_resumes()
            self._end_ranks_of_ranks()
            return RunResult(state=WorkerState.HEALTHY)
        # For torch elastic, every end is a success: it would restart the ranks after a failure.
        ended = RunResult(WorkerState.SUCCEEDED, dict.fromkeys(w.global_rank for w in worker_group.workers))
        self.outcome = outcome = decision.outcome
        self._node.logs.show_failed_rank(outcome)  # before ddprun's own lines about the failure
        if outcome.code == 0:
            if self._no_group():  # then the message warns of separate trainings
                self._node.journal.log(outcome.message)
            self._node.workers.clear()  # kills the processes that the ranks have left
            self.consensus.post_gone()
            return ended
        self._recovery.failed(outcome.step)  # if no rank of this node failed before
        self._recovery.end_phase("detect")
        journal = self._node.journal
        facts = ("rank", "node", "step", "cause", "message")  # the event's keys (ddpwire.events)
        journal.emit("failed", **{fact: getattr(outcome, fact) for fact in facts})
        # A new ddprun replaces a node that leaves, so only the other nodes restart their ranks.
        restart = decision.restart and not (self._node.stop.leaves and outcome.cause == "stopped")
        self._is_restart = restart  # _stop_workers reads it
        if restart:
            self._node.series.count(ddpwire_metrics.RESTARTS, reason=outcome.cause)
            failed = f"attempt {self._rendezvous_handler.attempt} failed: {outcome.message}; restarting all ranks"
            step = self._node.files.read(last_checkpoint, self._node.folder.path, unknown=None)
            journal.log(failed if step is None else f"{failed}; the last checkpoint is at step {step}")
            journal.emit("restart", reason=outcome.cause)
            if not self._node.config.node_rank:  # once for the whole run
                self._node.commands.tell_restart(outcome)
            return RunResult(state=WorkerState.FAILED)
        self._stop_workers(worker_group)  # torch elastic calls it only after a failure
        return ended

    def _record_rank_states(self) -> None:
        """Record which ranks have not ended although they were asked to, so that ``ddpctl stop`` can name them."""
        alive, attempt = self._node.workers.alive, self._rendezvous_handler.attempt

        def state(process: RankProcess) -> str:
            if f"{attempt}.{process.local_rank}" not in alive:
                return "ended"
            return "stopped" if processes.is_stopped(process.pid) else "running"

        ranks = tuple(replace(process, state=state(process)) for process in self._processes)
        if ranks != self._node.journal.state.ranks:  # this is called often, and an update writes a file
            self._node.journal.update(ranks=ranks)

    def _no_group(self) -> bool:
        """Return whether this node knows that no rank of the run has a process group. Only node 0 can know this.

        A rank of node 0 records its process group in a file. A rank of another node cannot have a process group before
        it has used the attempt's store, which node 0 serves. Executed ranks write no such file, and a runtime folder
        that vanished has lost it.
        """
        node = self._node
        if node.config.node_rank or self._world_size == 1 or not node.workers.forks or node.folder.runtime.vanished:
            return False
        beats = (run_files.rank_heartbeat(process.rank) for process in self._processes)
        groups = (node.folder.runtime.path / f"{beat}{run_files.GROUP_SUFFIX}" for beat in beats)
        # ``is False``: None if this torch cannot list the keys of a store.
        return self._rendezvous_handler.ranks_have_met() is False and not any(path.exists() for path in groups)

    def _describe_success(self) -> str:
        if not self._no_group():
            return "every rank exited with 0"
        trainings = f"these were {self._world_size} separate trainings ({GUIDE})"
        return f"{self._world_size} ranks ran and none called init_process_group: {trainings}"

    def _report_no_group(self) -> None:
        """If no rank has a process group after NO_GROUP_S, log once that the ranks train separately."""
        if not self._reported_no_group and time.monotonic() > self._started_at + NO_GROUP_S:
            self._reported_no_group, number = True, self._world_size
            if self._no_group():
                consequence = f"until one does, these are {number} separate trainings ({GUIDE})"
                since = f"none of the {number} ranks has called init_process_group in {NO_GROUP_S:g} s"
                self._node.journal.log(f"{since}: {consequence}")

    def _post_resumes(self) -> None:
        """Report to node 0 what this node's ranks resume from, when all of them have taken their first steps."""
        if not self._waits_for_resumes:
            return
        folder, records, forks = self._node.folder.runtime.path, list[Resume](), self._node.workers.forks
        node = self._node.config.node_rank
        for process in self._processes:
            try:
                path = folder / f"{run_files.rank_heartbeat(process.rank)}{RESUME_SUFFIX}"
                record = json.loads(path.read_text()) if forks else {}  # an executed rank has no record
            except (OSError, ValueError):  # it is not there yet, or not complete
                return
            rank, local_rank = process.rank, process.local_rank
            records.append(Resume(rank=rank, node=node, local_rank=local_rank, is_known=forks, **record))
        self._waits_for_resumes = False
        self.consensus.post_resumes(records)

    def _report_resumes(self, resumes: Sequence[Resume]) -> None:
        """On node 0, log which ranks resume from which checkpoint if they differ."""
        if groups := find_differences(resumes):
            unknown = sorted(resume.rank for resume in resumes if not resume.is_known)
            facts = [
                {"ranks": [resume.rank for resume in group], "file": group[0].file, "step": group[0].step}
                for group in groups
            ]
            text = describe_differences(groups, unknown)
            self._node.journal.log(f"warning: {text}")
            self._node.journal.emit("resumed_apart", message=text, groups=facts, unknown=unknown)
            self._node.journal.update(resumed_apart=text)

    def _end_ranks_of_ranks(self) -> None:
        """End the attempt if each rank of this node has started further ranks, which block (SpawnWatch).

        The first rank stands for all. A failure with ``refused`` is an error, which is not restarted by default.
        """
        if self._spawn_watch and (reason := self._spawn_watch.find()):
            self._spawn_watch = None
            node, rank = self._node.config.node_rank, self._first_rank
            self.consensus.post_failure(Failure(node=node, rank=rank, status=1, refused=reason))

    def _report_first_heartbeat(self) -> None:
        if self._waits_for_heartbeat and (beats := self._node.heartbeats.beats()):
            self._waits_for_heartbeat = False
            # A heartbeat is read late, so the event gives its own time.
            first = min(beats.values(), key=lambda beat: beat.at_s)
            ago_s, took_s = time.monotonic() - first.at_s, first.at_s - self._started_at
            self._node.journal.emit("first_step", step=first.step, seconds=took_s, ago_s=ago_s)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        """End this node's ranks.

        They are killed at once if a rank hung, a node was lost, or a failure is followed by a restart: the others then
        wait in a collective that never ends. After a stop, they have time to save, even if a restart follows.
        """
        node, outcome = self._node, self.outcome
        cause = outcome.cause if outcome else ""
        if outcome and outcome.has_diagnosis:  # first, while the ranks can still answer
            self._diagnosis.keep()
        if cause == "hang":  # only then, because it ends the ranks
            path = node.folder.path / run_files.stacks_file(self._rendezvous_handler.attempt)
            heartbeat_monitor.dump_stacks(path, self._processes, node.workers, node.logs, node.files)
            node.journal.log(f"the stacks of this node's ranks are in {path}")
        if cause in ("hang", "node_lost") or (self._is_restart and cause != "stopped"):
            node.workers.clear()
        else:
            if not self._is_restart:  # "stopping" means that the run ends
                node.journal.update(state="stopping")
            # A Ctrl-C may reach another node first: these ranks must not get SIGTERM instead of their SIGINT.
            number = signal.SIGINT if outcome and outcome.code == Exit.INTERRUPTED else node.stop.signal
            grace_s = node.config.grace_s if cause == "stopped" else PEER_GRACE_S
            node.stop.end_ranks(
                grace_s, number if cause == "stopped" else signal.SIGTERM, on_wait=self._record_rank_states
            )
        if node.stop.requested:  # on_wait is called only while ranks are alive
            self._record_rank_states()
        node.logs.close_attempt(restarting=self._is_restart)  # a restart neither waits for output nor names logs
        self._recovery.end_phase("teardown")
        node.downtime.ended(time.monotonic(), hung=cause == "hang", beats=node.heartbeats.beats().values())
        self.consensus.post_gone()  # last: node 0 keeps the store until every node has come this far

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._node.workers.clear()  # torch elastic calls this also after an error: no rank outlives the agent

    def _exit_barrier(self) -> None:
        """Do nothing, because the nodes have already agreed that all ranks succeeded."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """Return an event without the host's name. torch elastic would look the name up in DNS, which can hang."""
        return Event(f"ddprun.{state}", source)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:  # noqa: ARG002
        """Do nothing, because nobody reads the durations that torch elastic records."""
        yield
