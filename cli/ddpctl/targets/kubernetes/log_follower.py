"""Prints the logs of a run's pods while they are written, also of replacement pods, until the run's job has ended.

The target's verb ``logs`` starts this as a separate program (``python -m ddpctl.targets.kubernetes.log_follower
TASK``). It runs one `kubectl logs --follow` per container, because a single one for all containers stops when a pod is
replaced. It prints the nodes' lines, which begin with node and rank. Its own messages go to stderr.
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
from ddpctl.executor import Executor, end_with_parent
from ddpctl.run_store import Run, read
from ddpctl.targets.kubernetes.files import keep_placed
from ddpctl.targets.kubernetes.kubectl import Kubectl, error_of, items, kubectl_of, workload_of
from ddpctl.targets.kubernetes.pod import is_ours, selector_of
from ddpctl.targets.kubernetes.status import YOUNG_S, fold, has_ended, is_lost, newest_pods, unexplained
from ddpwire import log_record
from ddpwire.exits import Exit
from ddpwire.run_files import node_name


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to follow, passed as JSON on the command line."""

    folder: str  # the run's folder: its record is read there, and the records from the nodes' logs are saved there
    only: str | None  # a regular expression that a line must match
    only_nodes: Sequence[int]  # empty for all nodes
    tail: int | None
    replace_lost: bool = False
    timestamps: bool = False  # each line begins with its time
    poll_s: float = 2.0
    unreachable_s: float = 120.0  # how long the cluster may fail to answer before the program ends


@dataclass
class Follower:
    """Copies logs to stdout with one thread per container. Lines of different containers are never mixed."""

    task: Task
    run: Run
    kubectl: Kubectl
    _seen: set[tuple[str, int]] = field(default_factory=set)  # a pod's uid, how often its container was restarted
    _ended: dict[tuple[str, int], str] = field(default_factory=dict)  # when its stream ended, in UTC
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def follow_started(self, pods: dict[int, Any]) -> None:
        """Follow each started container that is not followed yet. Also print its log from before its last restart."""
        container = workload_of(self.run.handle).container
        for node, pod in pods.items():
            if self.task.only_nodes and node not in self.task.only_nodes:
                continue
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            found = next((s for s in pod["status"].get("containerStatuses", ()) if s["name"] == container), None)
            if not found:
                continue
            restarts = found["restartCount"]
            if restarts and self._first(uid, restarts - 1):
                self._start(name, (uid, restarts - 1), "--previous")
            if found["state"].keys() & {"running", "terminated"} and self._first(uid, restarts):
                self._start(name, (uid, restarts), "--follow")
            elif "running" in found["state"] and (since := self._ended.pop((uid, restarts), None)):
                self._start(name, (uid, restarts), "--follow", "--since-time", since)  # the connection was lost

    def finish(self, timeout_s: float) -> None:
        """Wait until the last line is printed, but at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _first(self, uid: str, restarts: int) -> bool:
        if (uid, restarts) in self._seen:
            return False
        self._seen.add((uid, restarts))
        return True

    def _start(self, pod: str, key: tuple[str, int], *how: str) -> None:
        thread = threading.Thread(target=self._copy, args=(pod, key, how), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _copy(self, pod: str, key: tuple[str, int], how: tuple[str, ...]) -> None:
        container = workload_of(self.run.handle).container
        tail: tuple[str, ...] = ("--tail", str(self.task.tail)) if self.task.tail is not None and len(how) == 1 else ()
        tail += ("--timestamps",) if self.task.timestamps else ()
        argv = (*self.kubectl.argv, "logs", pod, "--container", container, *how, *tail)
        end, null, record = end_with_parent(), subprocess.DEVNULL, ""
        with subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null, preexec_fn=end) as process:
            for line in process.stdout or ():
                text = line.partition(b" ")[2] if self.task.timestamps else line
                if match := log_record.LINE.match(text.decode(errors="replace")):
                    record += match[0] + "\n"
                    if match[2] == match[3]:
                        self._keep(int(match[1]), record)
                        record = ""
                elif self.task.only is None or re.search(self.task.only, line.decode(errors="replace")):
                    with self._lock:
                        sys.stdout.buffer.write(line)
                        sys.stdout.buffer.flush()
        if "--follow" in how:
            self._ended[key] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def _keep(self, node: int, record: str) -> None:
        """Save the files in a node's record. The log is printed even if they cannot be written."""
        if node < self.run.job.max_nodes and (files := log_record.unpack(record)):
            with self._lock, suppress(OSError):
                log_record.keep(Path(self.task.folder, node_name(node)), files)


def main() -> int:
    """Follow the logs; return the exit code."""
    task = Task(**json.loads(sys.argv[1]))
    run = read(Path(task.folder))
    if run is None:
        print(f"ddpctl: {task.folder} has no record of a run", file=sys.stderr)
        return Exit.NO_INPUT
    workload, kubectl, selector = workload_of(run.handle), kubectl_of(run.handle), selector_of(run.name, run.uid)
    follower = Follower(task=task, run=run, kubectl=kubectl)
    replaced: set[str] = set()  # uids of pods
    said_last, answered, parent = "", time.monotonic(), os.getppid()
    while os.getppid() == parent:  # in case the system does not end this program together with its ddpctl
        found = _ask(kubectl.get(f"{workload.resource}/{run.name}"))
        pods_found = found if found.returncode else _ask(kubectl.get("pods", "--selector", selector))
        if pods_found.returncode:
            error = str(error_of(pods_found))
            if time.monotonic() - answered > task.unreachable_s:
                print(f"ddpctl: {error}; gave up after {task.unreachable_s:g} s", file=sys.stderr)
                return Exit.UNAVAILABLE
            if error != said_last:
                said_last = error
                print(f"[{run.name}] {error}; giving up after {task.unreachable_s:g} s", file=sys.stderr, flush=True)
            time.sleep(task.poll_s)
            continue
        answered = time.monotonic()
        job, pods = next((one for one in items(found) if is_ours(one, run.uid)), None), items(pods_found)
        newest = newest_pods(workload, pods, master=bool(run.options.get("master")))
        follower.follow_started(newest)
        with suppress(OSError):
            keep_placed(Path(task.folder), newest)
        if task.replace_lost:
            replaced |= _replace_lost(kubectl, [pod for pod in pods if pod["metadata"]["uid"] not in replaced])
        if has_ended(job) and not (job is None and time.time() - run.created < YOUNG_S):
            follower.finish(timeout_s=30.0)
            return Exit.OK
        asked = unexplained(workload, job, pods, run.job.max_nodes)
        events = [event for name in asked for event in items(_ask(kubectl.events_of(name)))]
        state = fold(run, workload, job, pods, events, now=time.time())
        if state.message != said_last:
            said_last = state.message
            print(f"[{run.name}] {state.state}: {state.message}", file=sys.stderr, flush=True)
        time.sleep(task.poll_s)
    return Exit.KILLED


def _replace_lost(kubectl: Kubectl, pods: list[Any]) -> set[str]:
    """Delete the pods of lost machines; return the uids of all pods tried, so that each one is tried only once."""
    lost = [pod["metadata"] for pod in pods if is_lost(pod, time.time())]
    for pod in lost:
        done = _ask(kubectl.run("delete", "pod", pod["name"], "--force", "--grace-period=0", "--wait=false"))
        what = f"its deletion failed: {error_of(done)}" if done.returncode else "it is deleted, and another is made"
        print(f"{pod['name']}: its machine does not answer: {what}", file=sys.stderr, flush=True)
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
