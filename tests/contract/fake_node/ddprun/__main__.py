"""A node of a run without torch: ddpctl starts, watches, asks and stops it as it does a real ddprun.

The arguments of the script say what happens, in this order; train.py beside it does the same under a real ddprun:

    ranks=N,N,...  the number of ranks of each node, if they differ
    start=FILE     stay in the state starting until FILE exists
    steps=N        each rank takes N steps
    hang           a rank has not entered the last collective, in which the others wait
    wait           wait for a signal
    wait=FILE      the same, or until FILE exists
    save=FILE      after the first signal, the ranks save until FILE exists
    exit=CODE@R    rank R exits with CODE, which ends the run
    cause=C:CODE   the run ends with this cause and code
    vanish         ddprun and its ranks are killed

A rehearsal has a plan, whose command has these arguments. Its record is that of the file ``facts.json``.
"""

import base64
import contextlib
import fcntl
import gzip
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ddpwire import history, log_record, metrics, names, run_files
from ddpwire.events import EVENTS, EventLog
from ddpwire.exits import Exit
from ddpwire.run_files import MetricsTarget, NodeState, Outcome, RankProcess

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_S = 0.25
POLL_S = 0.02


class Node:
    """One node, from its start to its outcome."""

    def __init__(self, options: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.node = int(environ.get(names.NODE_RANK) or environ.get("SLURM_NODEID") or 0)
        nodes = options.get("--nnodes") or environ.get(names.NNODES) or environ["SLURM_JOB_NUM_NODES"]
        self.nodes, per_node = int(nodes.rpartition(":")[2]), int(environ.get(names.NPROC_PER_NODE) or 1)
        self.ranks = range(self.node * per_node, (self.node + 1) * per_node)
        self.world_size = self.nodes * per_node
        self.folder = Path(environ[names.RUN_DIR]) / run_files.node_name(self.node)
        self.checkpoints = Path(environ[names.CHECKPOINT_DIR])
        self.environ, self.step, self.stopped, self.stopped_at, self.answered = environ, 0, 0, 0.0, ""
        self.hangs, self.facts = False, list[Any]()
        self.lifeline = int(environ[names.LIFELINE_FD]) if names.LIFELINE_FD in environ else None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder / run_files.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        for name in (run_files.OUTCOME, run_files.SNAPSHOT, EVENTS, history.HISTORY):
            (self.folder / name).unlink(missing_ok=True)
        self.events = EventLog(self.folder / EVENTS, node=self.node)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        url = f"http://127.0.0.1:{self.server.getsockname()[1]}/metrics"
        run, uid = environ.get(names.RUN_ID, ""), environ.get(names.RUN_UID, "")
        master = f"{environ.get(names.NODE_MASTER_ADDR)}:{environ.get(names.NODE_MASTER_PORT)}"
        self.state = NodeState(run=run, run_uid=uid, node=self.node, pid=os.getpid(), state="starting",
                               started=time.time(), metrics=url, master=master)  # fmt: skip
        self.state.write(self.folder)
        if self.node == 0 and "SLURM_STEP_ID" in environ:
            (self.folder.parent / run_files.STEP).write_text(environ["SLURM_STEP_ID"])
        self.events.emit("node_started", host=socket.gethostname(), pid=os.getpid())
        self.targets = None
        if folder := environ.get(names.TARGETS_DIR):
            self.targets = Path(folder) / run_files.targets_file_name(run, self.node)
            self.targets.parent.mkdir(parents=True, exist_ok=True)
            target = MetricsTarget(url=url, job_id=run, node=self.node, launcher=environ.get(names.LAUNCHER, ""))
            self.targets.write_text(run_files.targets_text([target]))

    def start_ranks(self) -> None:
        """Fork the ranks, which end when this process ends: they read a pipe that it holds open."""
        (self.folder / "timed").mkdir(exist_ok=True)
        (self.folder / run_files.SUMMARY).write_text("{}")
        (self.folder / run_files.ENVIRONMENT).write_text(json.dumps({"host": socket.gethostname(), "torch": "none"}))
        for name in (run_files.DIAGNOSIS, run_files.DIAGNOSIS_REQUEST, run_files.PROFILE):
            (self.folder / name).write_text("")
        (self.folder / history.HISTORY).write_text(f"{history.HEADER}\n")
        self.events.emit("preflight_done", seconds=0.0)
        self.events.emit("rendezvous_done", seconds=0.0, nodes=self.nodes)
        reader, self.writer = os.pipe()
        processes = []
        for local, rank in enumerate(self.ranks):
            if not (pid := os.fork()):
                os.close(self.writer)
                os.read(reader, 1)
                os._exit(0)
            log = str(self.folder / run_files.rank_log(rank))
            processes.append(RankProcess(rank=rank, local_rank=local, pid=pid, log=log))
        os.close(reader)
        world_size = self.world_size
        self.events.emit("ranks_started", seconds=0.0, ranks=[*self.ranks], world_size=world_size)
        self.state = replace(self.state, state="training", ranks=tuple(processes))
        self.state.write(self.folder)
        self.log(f"ranks {self.ranks[0]} to {self.ranks[-1]} of {world_size} started (attempt 1)")

    def log(self, line: str, rank: int | None = None) -> None:
        """Write a line of a rank, or one of its own, to the console and the logs."""
        mark = f"[node{self.node}{'' if rank is None else f' rank{rank}'}] "
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        (self.folder / "timed").mkdir(exist_ok=True)
        with (self.folder / run_files.timed_log(rank)).open("a") as file:
            file.write(f"{now} {mark}{line}\n")
        if rank is not None:
            with (self.folder / run_files.rank_log(rank)).open("a") as file:
                file.write(f"{line}\n")
        print(mark + line, flush=True)

    def take_step(self, total: int) -> None:
        self.step += 1
        for rank in self.ranks:
            self.log(f"step {self.step}", rank)
        if self.step == 1:
            self.events.emit("first_step", seconds=0.0, step=1)
        values = {metrics.LAST_STEP.name: self.step, metrics.STEPS_PLANNED.name: total, metrics.RANKS_ALIVE.name: 2}
        with (self.folder / history.HISTORY).open("a") as file:
            file.write(history.line(time.time(), {name: float(value) for name, value in values.items()}) + "\n")

    def page(self) -> str:
        """Return the page of /metrics."""
        steps = (f'{metrics.LAST_STEP.name}{{rank="{rank}"}} {self.step}\n' for rank in self.ranks)
        return "".join(steps) + f"{metrics.RANKS_ALIVE.name} {len(self.ranks)}\n{metrics.CLOCK_OFFSET.name} 0.0\n"

    def poll(self) -> None:
        """Answer whoever asks, and take note of a signal."""
        if not self.stopped and self.lifeline is not None and select.select([self.lifeline], [], [], 0)[0]:
            os.kill(os.getpid(), signal.SIGTERM)  # the ddpctl that started this node has ended
        if info := signal.sigtimedwait(SIGNALS, POLL_S):
            number = signal.SIGTERM if info.si_signo == signal.SIGHUP else info.si_signo
            name = signal.Signals(number).name
            self.events.emit("signal", signal=name, **({} if self.stopped else {"sent": name}))
            if self.stopped and time.monotonic() > self.stopped_at + SAME_REQUEST_S:
                self.end(self.stopped_outcome("killed by a second signal"))
            if not self.stopped:
                self.stopped, self.stopped_at = number, time.monotonic()
                self.state = replace(self.state, state="stopping")
                self.state.write(self.folder)
        try:
            connection, _ = self.server.accept()
        except BlockingIOError:
            pass
        else:
            with connection:
                connection.recv(4096)
                connection.sendall(f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{self.page()}".encode())
        request = ""
        with contextlib.suppress(FileNotFoundError):  # while a test has moved the host's folder away
            request = (self.folder / run_files.DIAGNOSIS_REQUEST).read_text() if self.state.ranks else ""
        if request and request != self.answered:
            first, self.answered = not self.answered, request
            if request.startswith("profile "):
                self.profile(request, late_s=60.0 * self.node * first)
            else:
                self.diagnose(request)

    def diagnose(self, request: str) -> None:
        now, last = time.time(), self.nodes * len(self.ranks) - 1
        sample = {"state": "S", "ticks": 0, "switches": 0, "wchan": "", "links": [], "time": now, "threads": None}
        entry = {"group": "0", "desc": "default", "op": "all_reduce", "sizes": "[8]", "dtypes": "Float", "p2p": False}

        def collectives(rank: int) -> list[dict[str, Any]]:
            entered = [entry | {"seq": 1, "done": True, "at": now - 100}]
            return entered + [entry | {"seq": 2, "done": False, "at": now - 60}] * (self.hangs and rank != last)

        ranks = [{"rank": process.rank, "pid": process.pid, "group_at": now - 200, "samples": [sample], "children": [],
                  "collectives": collectives(process.rank), "time": now} for process in self.state.ranks]  # fmt: skip
        diagnosis = {"request": request, "node": self.node, "attempt": 1, "time": now, "ranks": ranks}
        run_files.write_atomic(self.folder / run_files.DIAGNOSIS, json.dumps(diagnosis).encode())

    def profile(self, request: str, *, late_s: float) -> None:
        """Answer with a recording. The first one of a node other than 0 begins when node 0's has ended."""
        began, seconds = time.time() + late_s, float(request.split()[1])
        trace = base64.b64encode(gzip.compress(b'{"traceEvents": []}')).decode()
        span = {"began": began, "ended": began + seconds, "trace": trace, "samples": []}
        ranks = [{"rank": process.rank, **span} for process in self.state.ranks]
        answer = {"node": self.node, "ranks": ranks, "request": request}
        run_files.write_atomic(self.folder / run_files.PROFILE, json.dumps(answer).encode())

    def save(self) -> None:
        if not self.state.ranks:
            return
        for line in log_record.pack_result({"runs": self.facts, "signal": self.stopped}) if self.facts else ():
            self.log(line, 0)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        path = self.checkpoints / f"step-{self.step:08}.pt"
        if self.node == 0:
            path.write_bytes(b"weights")
            self.events.emit("checkpoint_saved", step=self.step, seconds=0.0, bytes=7, path=str(path), rank=0)

    def stopped_outcome(self, how: str) -> Outcome:
        message, retry = f"stopped by {signal.Signals(self.stopped).name}: {how}", self.stopped != signal.SIGINT
        rank = self.ranks[0] if self.state.ranks else None
        code = 128 + self.stopped
        return Outcome(code=code, cause="stopped", message=message, node=self.node, rank=rank, retry=retry)

    def end(self, outcome: Outcome) -> NoReturn:
        outcome = replace(outcome, step=self.step or None) if outcome.code else outcome
        state = "succeeded" if outcome.code == 0 else "failed"
        ended = {"code": outcome.code, "cause": outcome.cause, "message": outcome.message}
        self.events.emit("node_ended", seconds=time.time() - self.state.started, **ended)
        (self.folder / run_files.SNAPSHOT).write_text(self.page())
        replace(self.state, state=state).write(self.folder)
        outcome.write(self.folder)
        if self.targets:
            self.targets.unlink(missing_ok=True)
        for line in log_record.pack(self.folder, 3600) if names.NODE_REPLACED in self.environ else ():
            self.log(line)
        self.log(outcome.message)
        sys.stdout.flush()
        os._exit(outcome.code)

    def end_with(self, name: str, value: str) -> None:
        """End as a word of the script says."""
        first, _, second = value.replace(":", "@").partition("@")
        if name == "exit":
            message = f"rank {second} exited with {first}"
            node = int(second) // len(self.ranks)
            self.end(Outcome(code=int(first), cause="error", message=message, node=node, rank=int(second)))
        if name == "cause":
            code, retry = int(second), int(second) > 127
            self.end(Outcome(code=code, cause=first, message=f"ended: {first}", retry=retry))  # type: ignore[arg-type]
        if name == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, file: str | None) -> None:
        while not self.stopped and not (file and Path(file).exists()):
            self.poll()

    def run(self, arguments: Sequence[str]) -> NoReturn:
        """Do what the script's arguments say, until the end or a signal."""
        script = [(name, value) for name, _, value in (word.partition("=") for word in arguments)]
        saves, self.hangs = dict(script).get("save"), ("hang", "") in script
        for name, value in script:
            if name == "ranks":
                counts = [int(count) for count in value.split(",")]
                assert counts[self.node] == len(self.ranks)
                first, self.world_size = sum(counts[: self.node]), sum(counts)
                self.ranks = range(first, first + len(self.ranks))
            elif name == "start":
                self.wait(value)
            elif not self.state.ranks and not self.stopped:
                self.start_ranks()
            if self.stopped:
                break
            for _ in range(int(value) if name == "steps" else 0):
                self.take_step(int(value))
                self.poll()
            if name in ("wait", "hang"):
                self.wait(value or None)
            self.end_with(name, value)
        self.save()
        while self.stopped and saves and not Path(saves).exists():
            self.poll()
        if not self.stopped:
            self.end(Outcome(code=Exit.OK, cause="ok", message="every rank exited with 0"))
        self.end(self.stopped_outcome("its ranks have saved"))


def main(argv: list[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    options = {}
    while argv and argv[0].startswith("--"):  # each option that ddpctl gives has a value
        options[argv[0]] = argv[1]
        del argv[:2]
    node, arguments = Node(options, os.environ), argv[2 if argv[0] == "-m" else 1 :]
    if argv[:2] == ["-m", "ddprun.rehearsal"]:
        Path("plan.json").write_text(argv[2])
        node.facts, arguments = json.loads(Path("facts.json").read_text()), json.loads(argv[2])["command"][1:]
    node.run(arguments or ["steps=1"])


if __name__ == "__main__":
    main(sys.argv[1:])
