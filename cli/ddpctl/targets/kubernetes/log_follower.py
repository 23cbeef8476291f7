"""A program that prints the new log lines of a run's pods until the run's job has ended.

The target's verb ``logs`` starts it: ``python -m ddpctl.targets.kubernetes.log_follower TASK``. The program starts
``kubectl logs --follow`` for each container, because one command for all containers would stop when a pod is replaced.
It prints its own messages to stderr.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ddpctl.command import NOT_FOUND, Command, Output, once
from ddpctl.errors import UnavailableError
from ddpctl.execution.executor import Executor, end_with_parent
from ddpctl.runs.run_store import Run, read
from ddpctl.targets.kubernetes.files import keep_placed, scheduled
from ddpctl.targets.kubernetes.kubectl import Kubectl, error_of, items, kubectl_of, workload_of
from ddpctl.targets.kubernetes.pod import is_ours, selector_of
from ddpctl.targets.kubernetes.status import YOUNG_S, fold, has_ended, is_lost, newest_pods, unexplained
from ddpwire import log_record
from ddpwire.exits import Exit
from ddpwire.run_files import OUTCOME, node_name

# Written by the kubelet in RFC 3339, in UTC, without zeros at the end of the fraction.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z ")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The options of the program, which are passed as JSON on the command line."""

    folder: str  # the run's local folder, which contains its record and receives the files in the nodes' logs
    only: str | None  # a regular expression that a line must match
    only_nodes: Sequence[int]  # empty for all nodes
    tail: int | None
    replace_lost: bool = False
    timestamps: bool = False  # each line begins with its time
    poll_s: float = 2.0
    unreachable_s: float = 120.0  # the program ends if the cluster does not answer for so long


# The last line of a container's log that was printed: its time, with nine digits after the second so that times can be
# compared, and how many lines of that time were printed.
Position = tuple[bytes, int]


@dataclass
class Follower:
    """Copies the logs of containers to stdout, with one thread per container. Each line is written as a whole."""

    task: Task
    run: Run
    kubectl: Kubectl
    _seen: set[tuple[str, int]] = field(default_factory=set)  # a pod's uid, and its container's number of restarts
    _ended: dict[tuple[str, int], Position | None] = field(default_factory=dict)  # the same → where its log ended
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def follow_started(self, pods: dict[int, Any]) -> None:
        """Start to follow each container that has started since the last call.

        If a container was restarted, also print the log from before its last restart.
        """
        container = workload_of(self.run.handle).container
        for node, pod in pods.items():
            if self.task.only_nodes and node not in self.task.only_nodes:
                continue
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            for status in pod["status"].get("containerStatuses", ()):
                if status["name"] != container:
                    continue
                restarts, key = status["restartCount"], (uid, status["restartCount"])
                if restarts and self._first(uid, restarts - 1):
                    self._start(name, (uid, restarts - 1), "--previous")
                if status["state"].keys() & {"running", "terminated"} and self._first(*key):
                    self._start(name, key, "--follow")
                elif "running" in status["state"] and key in self._ended:  # the connection was lost
                    self._start(name, key, "--follow", after=self._ended.pop(key))

    def finish(self, timeout_s: float) -> None:
        """Wait until all lines are printed, but at most ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _first(self, uid: str, restarts: int) -> bool:
        if (uid, restarts) in self._seen:
            return False
        self._seen.add((uid, restarts))
        return True

    def _start(self, pod: str, key: tuple[str, int], *how: str, after: Position | None = None) -> None:
        thread = threading.Thread(target=self._copy, args=(pod, key, how, after), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _copy(self, pod: str, key: tuple[str, int], how: tuple[str, ...], after: Position | None) -> None:
        container = workload_of(self.run.handle).container
        tail: tuple[str, ...] = ("--tail", str(self.task.tail)) if self.task.tail is not None and not after else ()
        since = ("--since-time", f"{after[0][:19].decode()}Z") if after else ()  # the API server knows only seconds
        argv = (*self.kubectl.argv, "logs", pod, "--container", container, *how, *tail, *since, "--timestamps")
        end, null, record = end_with_parent(), subprocess.DEVNULL, ""
        position, rest = after, after[1] if after else 0
        with subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null, preexec_fn=end) as process:
            for line in process.stdout or ():
                text = line
                if match := _TIME.match(line):  # not a line of kubectl itself
                    text, written = line[match.end() :], match[1] + b"." + (match[2] or b"").ljust(9, b"0")
                    if after and rest and written <= after[0]:
                        rest -= written == after[0]
                        continue  # printed before the connection was lost
                    count = position[1] if position and position[0] == written else 0
                    position, rest = (written, count + 1), 0
                if part := log_record.LINE.match(text.decode(errors="replace")):
                    record += part[0] + "\n"
                    if part[2] == part[3]:
                        self._keep(int(part[1]), record)
                        record = ""
                    continue
                shown = line if self.task.timestamps else text
                if self.task.only is None or re.search(self.task.only, shown.decode(errors="replace")):
                    with self._lock:
                        sys.stdout.buffer.write(shown)
                        sys.stdout.buffer.flush()
        if "--follow" in how:
            self._ended[key] = position

    def _keep(self, node: int, record: str) -> None:
        files = log_record.unpack(record)
        files.pop(OUTCOME, None)  # the pod may be replaced
        if node < self.run.job.max_nodes and files:
            with self._lock, suppress(OSError):
                log_record.keep(Path(self.task.folder, node_name(node)), files)


def main() -> int:
    """Follow the logs until the job has ended. Return the exit code."""
    task = Task(**json.loads(sys.argv[1]))
    run = read(Path(task.folder))
    if run is None:
        print(f"ddpctl: {task.folder} has no record of a run", file=sys.stderr)
        return Exit.NO_INPUT
    workload, kubectl, selector = workload_of(run.handle), kubectl_of(run.handle), selector_of(run.name, run.uid)
    follower = Follower(task=task, run=run, kubectl=kubectl)
    replaced: set[str] = set()  # uids of pods
    printed, answered, parent = "", time.monotonic(), os.getppid()
    while os.getppid() == parent:  # in case the system does not end this program together with its ddpctl
        job_answer = _ask(kubectl.get(f"{workload.resource}/{run.name}"))
        answer = job_answer if job_answer.returncode else _ask(kubectl.get("pods", "--selector", selector))
        if answer.returncode:
            error = str(error_of(answer))
            if time.monotonic() - answered > task.unreachable_s:
                print(f"ddpctl: {error}; gave up after {task.unreachable_s:g} s", file=sys.stderr)
                return Exit.UNAVAILABLE
            if error != printed:
                printed = error
                line = f"[{run.name}] {error}; trying again for up to {task.unreachable_s:g} s"
                print(line, file=sys.stderr, flush=True)
            time.sleep(task.poll_s)
            continue
        answered = time.monotonic()
        job, pods = next((item for item in items(job_answer) if is_ours(item, run.uid)), None), items(answer)
        newest = newest_pods(workload, pods, master=bool(run.options.get("master")))
        follower.follow_started(newest)
        with suppress(OSError):
            keep_placed(Path(task.folder), {node: scheduled(pod) for node, pod in newest.items()})
        if task.replace_lost:
            replaced |= _replace_lost(kubectl, [pod for pod in pods if pod["metadata"]["uid"] not in replaced])
            pods = [pod for pod in pods if pod["metadata"]["uid"] not in replaced]
        if has_ended(job) and not (job is None and time.time() - run.created < YOUNG_S):
            follower.finish(timeout_s=30.0)
            return Exit.OK
        names = unexplained(workload, job, pods, run.job.max_nodes)
        events = [event for name in names for event in items(_ask(kubectl.events_of(name)))]
        state = fold(run, workload, job, pods, events, now=time.time())
        if state.message != printed:
            printed = state.message
            print(f"[{run.name}] {state.state}: {state.message}", file=sys.stderr, flush=True)
        time.sleep(task.poll_s)
    return Exit.KILLED


def _replace_lost(kubectl: Kubectl, pods: list[Any]) -> set[str]:
    """Try to delete the pods on lost machines. Return the uids of these pods, even if a deletion failed."""
    lost = [pod["metadata"] for pod in pods if is_lost(pod, time.time())]
    for pod in lost:
        done = _ask(kubectl.run("delete", "pod", pod["name"], "--force", "--grace-period=0", "--wait=false"))
        result = f"its deletion failed: {error_of(done)}" if done.returncode else "it is deleted, and will be replaced"
        print(f"{pod['name']}: its machine does not answer: {result}", file=sys.stderr, flush=True)
    return {pod["uid"] for pod in lost}


def _ask(command: Command) -> Output:
    try:
        return _executor().perform(once(command))
    except UnavailableError as error:  # the command cannot be started
        return Output(returncode=NOT_FOUND, stderr=str(error))


@cache
def _executor() -> Executor:
    return Executor(os.environ, has_stdin=False)


if __name__ == "__main__":
    sys.exit(main())
