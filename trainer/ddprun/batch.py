"""``python -m ddprun.batch --requeues=N SRUN``: run the srun of a Slurm job, and requeue the job if that may help.

The batch script replaces itself with this program. SRUN is the command line that starts one ddprun per node. Before it,
a short step checks that every node can run ddprun. While it runs, the signals to the batch script reach the ranks:

    SIGUSR1    Slurm's warning (``sbatch --signal``): the ranks get SIGTERM, and the job is requeued
    SIGUSR2    ``ddpctl stop``: the ranks get SIGTERM; a second one kills them
    SIGINT     Ctrl-C: the ranks get SIGINT; a second one kills them
    SIGTERM    ``scancel``, after which Slurm itself signals the step

SIGTERM goes to the step with scancel, because srun kills its tasks at once if it gets SIGTERM. SIGINT goes to ddprun
alone, which forwards it: scancel may signal every process of the step, and the ranks would get SIGINT twice.
"""

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from ddpwire import names
from ddpwire.exits import Exit, of_status, worth_a_retry
from ddpwire.run_files import OUTCOME, STEP, Outcome, node_name, read_outcome

POLL_S = 0.2  # while the ranks have yet to get a signal, or a file has yet to appear
AGAIN_S = 6.0  # between two requests, because ddprun takes two signals within 5 s for one (docs/decisions/0009)
RETRY_S = 1.0  # after a scancel that has failed
SHARED_S = 10.0  # a network file system may show a new file late
ASK_S = 30  # longer than Slurm's own time-out of a message, 10 s by default
NO_ANSWER = 124  # the exit code of timeout(1)
INTERRUPT = 'exec "$0" -P -m ddprun.nodectl signal --signal=INT --find=10 "$DDP_RUN_DIR/node-$SLURM_NODEID"'


class BatchStep:
    """The srun of a job, and the requests that this process has got."""

    def __init__(self, srun: Sequence[str], run_dir: Path, *, max_requeues: int) -> None:
        self._srun, self._run_dir, self._max_requeues = srun, run_dir, max_requeues
        self._options = ["srun", *takewhile(lambda word: word.startswith("-"), srun[1:])]
        self._job, self._requeues = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._warned = False
        self._stops = 0  # the number of requests to stop
        self._wanted = self._sent = 0  # the number of signals that the ranks should get, and have got
        self._next_at = 0.0  # when the next signal may be sent
        self._stop_signal = signal.SIGTERM
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda number, _: self._signals.put(number))

    def run(self) -> int:
        """Check the nodes, run srun, requeue the job if that may help, and return the exit code of the job."""
        token = self._run_dir / f"seen-{self._job}"
        token.touch()
        check = (*self._options, "--wait=60", sys.executable, "-P", "-m", "ddprun.batch", f"--check={token}")
        code = self._wait(check)
        token.unlink(missing_ok=True)
        if self._wanted:
            code = 128 + self._stop_signal
        elif code:
            code = Exit.NO_INPUT if code == Exit.NO_INPUT else Exit.UNAVAILABLE
            message = f"not every node can run {sys.executable} with torch and ddprun: see the lines above"
            say(message)
            (node_dir := self._run_dir / node_name(0)).mkdir(exist_ok=True)
            Outcome(code=code, cause="unavailable", message=message).write(node_dir)
        else:
            code = self._wait(self._srun, is_main=True)
            if any(outcome.code == 0 for outcome in self._outcomes()):  # srun also counts a task of a lost machine
                code = 0
        if not (self._may_help(code) and self._requeue()):
            with contextlib.suppress(OSError):
                secrets = self._run_dir / "secrets"
                facts = ask("scontrol", "--oneliner", "show", "job", self._job).stdout if secrets.exists() else ""
                if re.search(rf"^JobId={self._job} .* Restarts={self._requeues} ", facts, re.MULTILINE):
                    secrets.unlink()  # Slurm itself has not requeued the job, as it does to preempt it
        return code

    def _wait(self, command: Sequence[str], *, is_main: bool = False) -> int:
        """Run ``command`` to its end, and return its exit code. If ``is_main`` is set, pass signals on to its ranks."""
        # In a process group of its own, srun does not get the Ctrl-C of a terminal, which would end the step.
        process = subprocess.Popen(command, process_group=0)
        while (code := process.poll()) is None:
            waits = self._sent < self._wanted
            with contextlib.suppress(queue.Empty):
                self._receive(self._signals.get(timeout=POLL_S if waits else None))
            if waits and not is_main:  # no rank has started
                process.kill() if self._stops > 1 else process.terminate()
            elif waits and time.monotonic() >= self._next_at:
                with contextlib.suppress(OSError):  # ddprun has not yet written the number of the step
                    if step := (self._run_dir / STEP).read_text().strip():  # Slurm takes "JOB." for the step 0
                        self._send(step)
        return of_status(code)

    def _receive(self, number: int) -> None:
        if number == signal.SIGUSR1:
            say("Slurm will end this job soon: asking the ranks to save and end")
            self._warned, self._wanted = True, max(self._wanted, 1)
        elif number != signal.SIGCHLD:
            self._stops += 1
            self._wanted = max(self._wanted, self._stops)
            if number == signal.SIGINT:
                say("interrupted: the ranks get SIGINT")
                self._stop_signal = signal.SIGINT
            elif number == signal.SIGUSR2:
                say("stopped on request: asking the ranks to save and end")
            else:
                state = ask("squeue", "--noheader", f"--jobs={self._job}", "--format=%T")
                if state.returncode == 0 and "RUNNING" not in state.stdout.split():
                    self._sent = self._wanted  # Slurm ends the job, and has signalled the step

    def _send(self, step: str) -> None:
        """Signal the ranks. If Slurm refuses, try again later.

        A request without an answer counts as sent: Slurm may have passed it on, and a second one would kill the ranks.
        """
        interrupt = (*self._options, "--overlap", "sh", "-c", INTERRUPT, sys.executable)
        terminate = ("scancel", "--quiet", "--signal=TERM", f"{self._job}.{step}")
        commands = (interrupt, terminate) if self._stop_signal == signal.SIGINT else (terminate,)
        is_sent = any(ask(*command).returncode in (0, NO_ANSWER) for command in commands)
        self._sent += is_sent
        self._next_at = time.monotonic() + (AGAIN_S if is_sent else RETRY_S)

    def _outcomes(self) -> list[Outcome]:
        outcomes = []
        for path in self._run_dir.glob(f"node-*/{OUTCOME}"):
            with contextlib.suppress(OSError, ValueError):
                outcomes.append(read_outcome(path.read_text()))
        return outcomes

    def _may_help(self, code: int) -> bool:
        """Return whether another start of the job may help. An allocation cannot be requeued."""
        outcomes = self._outcomes()
        gave_up = any(outcome.code == Exit.GAVE_UP for outcome in outcomes)
        if code == 0 or self._stops or gave_up or os.environ.get("ENVIRONMENT") != "BATCH":
            return False
        return self._warned or (any(outcome.retry for outcome in outcomes) if outcomes else worth_a_retry(code))

    def _requeue(self) -> bool:
        """Requeue the job, and return whether Slurm has accepted that, or may have."""
        if self._requeues >= self._max_requeues:
            say(f"not requeued: its limit of {self._max_requeues} requeues is reached")
            return False
        done = ask("scontrol", "requeue", self._job)
        if done.returncode == NO_ANSWER:
            say(f"it is unknown whether the job is requeued: {done.stderr.strip() or 'no answer'}")
        else:
            say(f"not requeued: {done.stderr.strip()}" if done.returncode else "requeued")
        return done.returncode in (0, NO_ANSWER)


def ask(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's programs. If it does not end in time, or Slurm does not answer, its exit code is NO_ANSWER."""
    command = ("timeout", str(ASK_S), *command)
    done = subprocess.run(command, capture_output=True, text=True, check=False, process_group=0)
    if done.returncode and "timed out" in done.stderr.lower():  # such as "Socket timed out on send/recv operation"
        done.returncode = NO_ANSWER
    return done


def check_node(token: Path) -> int:
    """Check that this node sees the run's folder and has torch. If it does not, print the reason."""
    node, deadline = os.environ.get("SLURMD_NODENAME", ""), time.monotonic() + SHARED_S
    while not token.exists():
        if time.monotonic() > deadline:
            say(f"{node}: {token.parent} is not the folder of node 0: set RUN_DIR to a folder that all nodes share")
            return Exit.NO_INPUT
        time.sleep(POLL_S)
    if importlib.util.find_spec("torch") is None:
        say(f"{node}: {sys.executable} has no torch")
        return Exit.NO_INPUT
    return Exit.OK


def say(line: str) -> None:
    """Print a line into the log of the job."""
    print(f"slurm: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the batch step, or the check of one node, and return the exit code."""
    parser = argparse.ArgumentParser(prog="ddprun.batch", description="Run the srun of a Slurm job.")
    parser.add_argument("--requeues", type=int, default=0, metavar="N", help="requeue the job at most N times")
    parser.add_argument("--check", type=Path, metavar="FILE", help="only check this node, and that it sees FILE")
    parser.add_argument("srun", nargs=argparse.REMAINDER, help="the command line of srun, with options as --NAME=VALUE")
    args = parser.parse_args()
    if args.check:
        return check_node(args.check)
    return BatchStep(args.srun, Path(os.environ[names.RUN_DIR]), max_requeues=args.requeues).run()


if __name__ == "__main__":
    sys.exit(main())
