"""Check what ddpctl reports after a random signal to one process of a run of 2 nodes x 2 ranks.

    python bench/random_kills.py [--runs 30] [--seed 0] [--epochs 15] [--limit 180] [--only ROLE] [--json F]

The seed of a run determines:

- the process that gets the signal: ddpctl, its log reader, a ddprun, the process that forks the ranks of a ddprun, a
  rank, or a child of a rank
- the signal: SIGKILL, SIGTERM, or SIGSTOP with a SIGCONT 12 s later
- the moment
- whether each rank has a DataLoader worker

Some runs are ended by `ddpctl stop` instead of a signal. `--seed 7 --runs 1` repeats the run of seed 7.

The benchmark waits for the end of the run. Then it checks whether the exit code of `ddpctl launch` and the output of
`status --json` and `timeline --json` agree with what was done. It finds the processes of a run by a variable in their
environment. The exit code is 1 if ddpctl reported anything false, if a process was left, or if a launch did not end.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import measuring
import psutil

STEPS_PER_EPOCH = 45  # of the digits, whatever the number of ranks
ACTIVE = ("pending", "starting", "rendezvous", "running", "training", "stopping", "suspended")
ROLES = {"rank": 5, "ddprun": 4, "supervisor": 3, "child": 3, "ddpctl": 3, "reader": 1, "stop": 2}  # and their weights
SIGNALS = {"KILL": 6, "TERM": 2, "STOP": 2}
CONTINUE_S = 12.0  # how long a process is stopped
START_S = 5.0  # about what a start takes
CLEAR_S = 15.0  # after the end of launch; nothing of the run may be alive then
MARK = "RANDOM_KILLS_MARK"
# The states that status may report at the end, by role and signal. If none is listed, it must report succeeded.
ALLOWED = {
    ("rank", "KILL"): {"succeeded"},  # all ranks start again
    ("rank", "TERM"): {"succeeded", "stopped"},  # restarted, or it saved and stopped
    ("ddprun", "KILL"): {"failed", "lost"},  # a node is lost, and nobody starts it again here
    ("ddprun", "TERM"): {"stopped"},
    ("ddprun", "STOP"): {"succeeded", "failed"},
    ("supervisor", "KILL"): {"succeeded", "failed"},
    ("supervisor", "TERM"): {"succeeded"},  # its signals are blocked
    ("child", "KILL"): {"succeeded", "failed"},
    ("child", "TERM"): {"succeeded", "failed"},
    ("ddpctl", "KILL"): {"stopped", "failed", "lost"},  # the run is tethered to it
    ("ddpctl", "TERM"): {"stopped"},
    ("stop", "stop"): {"stopped"},
}


def processes(mark: str) -> dict[int, tuple[int, str, str]]:
    """Return the parent, state and command of each process that has ``mark`` in its environment. The keys are pids."""
    states = {}
    for process in measuring.processes_with(MARK, mark):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            states[process.pid] = (process.ppid(), process.status(), " ".join(process.cmdline()))
    return states


def roles(states: dict[int, tuple[int, str, str]], launch: int, ranks: set[int]) -> dict[str, list[int]]:
    """Return the pids of each role."""
    by_role: dict[str, list[int]] = {role: [] for role in ROLES if role != "stop"}
    for pid, (parent, _, command) in sorted(states.items()):
        if pid == launch:
            role = "ddpctl"
        elif pid in ranks:
            role = "rank"
        elif parent in ranks:
            role = "child"
        elif "ddprun.nodectl logs" in command:
            role = "reader"
        elif parent == launch and "-m ddprun " in command:
            role = "ddprun"
        elif states.get(parent, (0, "", ""))[0] == launch and "nodectl" not in command:
            role = "supervisor"
        else:
            continue
        by_role[role].append(pid)
    return by_role


class Run:
    """One launch, the signal to one of its processes, and the check of what ddpctl reports."""

    def __init__(self, root: Path, number: int, args: argparse.Namespace) -> None:
        self.name, self.root, self.limit_s = f"kill{args.seed + number}", root, args.limit
        self.mark = f"{os.getpid()}-{number}"
        self.environ = measuring.clean_environ() | {"DDPCTL_STATE_DIR": str(root / "runs")}
        chance = random.Random(args.seed + number)  # noqa: S311
        self.signalled_rank: int | None = None
        self.chance, self.number, self.steps = chance, number, args.epochs * STEPS_PER_EPOCH
        loader = ["--input", "loader", "--workers", "1"] if chance.random() < 0.5 else []
        self.delay_s = chance.uniform(0.2, START_S + args.epochs)
        self.role = chance.choices(list(ROLES), list(ROLES.values()))[0]
        self.role = args.only or self.role
        if self.role in ("rank", "child"):
            self.delay_s = chance.uniform(0.0, float(args.epochs))
        self.signal = "stop" if self.role == "stop" else chance.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        self.log = root / f"{self.name}.log"
        argv = ["launch", "--name", self.name, "--nodes", "2", "--gpus", "2", "--device", "cpu", "--"]
        argv += ["-m", "ddptrain", "--epochs", str(args.epochs), *loader]
        with self.log.open("w") as out:
            self.launch = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddpctl", *argv],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environ | {MARK: self.mark},
                cwd=root, start_new_session=True,
            )  # fmt: skip

    def ask(self, *argv: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "ddpctl", *argv]
        try:
            done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return -1, "no answer within 60 s"
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def rank_pids(self) -> dict[int, int]:
        """Return the ranks that run now, keyed by their pids."""
        rank_of = {}
        for path in (self.root / "runs" / self.name).glob("node-*/node.json"):
            try:
                rank_of |= {entry["pid"]: entry["rank"] for entry in json.loads(path.read_text())["ranks"]}
            except (OSError, ValueError, KeyError):
                continue
        return rank_of

    def send(self) -> str:
        """Wait for the chosen moment and send the signal. Return what was done, or "" if the run had ended."""
        deadline = time.monotonic() + self.limit_s
        while self.role in ("rank", "child") and not self.rank_pids() and time.monotonic() < deadline:
            time.sleep(0.1)  # the delay counts from their start, however slow this machine is
        time.sleep(self.delay_s)
        ranks = self.rank_pids()
        pids = roles(processes(self.mark), self.launch.pid, set(ranks))
        if self.role == "stop":
            code, text = self.ask("stop", self.name)
            return f"ddpctl stop ({code}: {text.strip().splitlines()[-1:]})"
        if self.role not in ("ddpctl", "reader") and not pids[self.role]:
            self.role = next((role for role in ("rank", "supervisor", "ddprun", "ddpctl") if pids[role]), "ddpctl")
        if not pids[self.role]:
            return ""
        pid = self.chance.choice(pids[self.role])
        os.kill(pid, getattr(signal, f"SIG{self.signal}"))
        self.signalled_rank = ranks.get(pid)
        if self.signal == "STOP":
            time.sleep(CONTINUE_S)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return f"SIGSTOP to {self.role} {pid}, which was dead {CONTINUE_S:g} s later"
        return f"SIG{self.signal} to {self.role} {pid}" + (f" (rank {ranks[pid]})" if pid in ranks else "")

    def judge(self) -> tuple[str, list[str]]:
        """Send the signal and wait for the end. Return a line about the run, and a list of what was wrong."""
        began, wrong = time.monotonic(), []
        sent = self.send()
        try:
            code = self.launch.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            wrong.append(f"hang: launch has not ended {self.limit_s:g} s after the signal")
        end = time.monotonic()
        deadline = time.monotonic() + CLEAR_S
        while (orphans := processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        clear_s = time.monotonic() - end
        status_code, text = self.ask("status", self.name, "--json")
        wrong += [f"orphan: {pid} {state} {command}" for pid, (_, state, command) in orphans.items()]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launch.wait()
        line = f"{self.name} at {self.delay_s:5.1f} s  {sent or 'nothing, it was over':50}"
        try:
            status = json.loads(text)
        except ValueError:
            if status_code == 66 and self.role == "ddpctl":
                return line + "  it ended before there was a run", wrong
            return line + "  no status", [*wrong, f"status: {status_code} {text.strip()[-300:]}"]
        timeline_code, text = self.ask("timeline", self.name, "--json")
        timeline = json.loads(text) if timeline_code == 0 else {}
        wrong += self.compare(sent, code, status, timeline)
        if timeline_code and not (self.delay_s < 2):
            wrong.append(f"timeline: {timeline_code} {text.strip()[-200:]}")
        progress = status.get("progress") or {}
        line += (
            f"  launch {code}, status {status['state']} {status['code']}, step {progress.get('step')}, "
            f"restarts {timeline.get('restarts')}, {end - began:.0f}+{clear_s:.1f} s: {status['message'][:160]}"
        )
        return line, wrong

    def compare(self, sent: str, code: int | None, status: dict, timeline: dict) -> list[str]:
        """Return a sentence for each statement of status, timeline and exit code that is false."""
        state, status_code, message = status["state"], status["code"], status["message"][:200]
        step = (status.get("progress") or {}).get("step")
        cause = (status.get("outcome") or {}).get("cause")
        blamed = (status.get("outcome") or {}).get("rank")
        was_over = state == "succeeded" and step == self.steps and not timeline.get("restarts")
        allowed = ALLOWED.get((self.role, self.signal), {"succeeded"})
        restarts = 1 if (self.role, self.signal, state) == ("rank", "KILL", "succeeded") and not was_over else None
        false = {
            f"status says {state}, and nothing of the run is alive": state in ACTIVE,
            f"status: {state} with code {status_code}": (state == "succeeded") != (status_code == 0),
            f"launch exited with {code}, status says {status_code}": self.role != "ddpctl"
            and code not in (None, status_code),
            f"succeeded at step {step} of {self.steps}": state == "succeeded" and step != self.steps,
            f"timeline says {timeline.get('state')} {timeline.get('code')}, status {state} {status_code}": bool(
                timeline
            )
            and (timeline["state"], timeline["code"]) != (state, status_code),
            f"{sent}: {state} ({cause}), not {' or '.join(sorted(allowed))}: {message}": bool(sent)
            and state not in allowed
            and not was_over,
            f"the script is blamed ({cause}, {status_code}): {message}": cause == "error"
            or (bool(sent) and status_code in range(1, 64)),
            f"rank {blamed} is blamed, rank {self.signalled_rank} got the signal": self.role == "rank"
            and blamed not in (None, self.signalled_rank),
            f"timeline counts {timeline.get('restarts')} restarts after one killed rank": bool(timeline)
            and restarts not in (None, timeline["restarts"]),
        }
        return [statement for statement, is_false in false.items() if is_false]


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds from the signal to the end")
    parser.add_argument("--only", choices=ROLES, help="always send it to that process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, counts = [], Counter()
    with tempfile.TemporaryDirectory(prefix="random-kills-") as folder:
        root = Path(folder).resolve()
        for number in range(args.runs):
            run = Run(root, number, args)
            line, wrong = run.judge()
            print(f"{line}  {'WRONG' if wrong else 'ok'}  (--seed {args.seed + number} --runs 1)", flush=True)
            for statement in wrong:
                print(f"      - {statement}", flush=True)
            counts[f"{run.role} {run.signal} {'wrong' if wrong else 'ok'}"] += 1
            results.append({"seed": args.seed + number, "role": run.role, "line": line, "wrong": wrong})
    bad = sum(bool(result["wrong"]) for result in results)
    print(
        f"{len(results)} runs, {bad} with something wrong: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))
    )
    measuring.write_json(args.json, results)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
