"""What a run with spares does if machines are lost: python bench/lost_machines.py [--rounds N] [--only NAME,...]

Each machine is a network namespace with one ddprun and one rank. All ddpruns are forked from this process, which has
imported torch: a round takes a minute less on a busy machine. To lose a machine, its link is set down and all of its
processes are killed at once. Nothing starts a ddprun again. Each round checks that the ranks train again within
LIMIT_S, that the final weights are those of an undisturbed run, that no two processes of a rank ever trained at the
same time, the exit codes, and that no process is left. Needs root and ip (iproute2).

With --torchrun, torchrun runs the same script beside it (c10d on the first machine, --max-restarts 3): the last machine
is a further agent, which torchrun keeps for a lost one. It prints when the ranks train again, or when the agents end.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import random
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lab
import measuring

from ddpwire.exits import of_status
from ddpwire.run_files import NodeState, read_node

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "fault_injection" / "training.py"
PORT, NODES = "61234", 3
STEPS, PAUSE_S = 100, 0.1
LIMIT_S = 15.0  # from a loss to the first step of all ranks, or to the end
WAIT_S, POLL_S = 90.0, 0.02
TORCHRUN_S = 180.0
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
ORPHANS_S = 5.0  # processes of a ddprun that has ended end within 2 s


class WrongError(Exception):
    """Raised if a round does not end as it should."""


@dataclass(kw_only=True)
class Run:
    """A run on namespaces, of which the last ones are spares."""

    machines: tuple[lab.Machine, ...]
    folder: Path
    spares: int
    pause_s: float = PAUSE_S
    options: tuple[str, ...] = ()
    module: str = "ddprun"
    processes: dict[int, int] = field(default_factory=dict)  # machine → the pid of its ddprun
    statuses: dict[int, int] = field(default_factory=dict)  # machine → the exit code of its ddprun
    lost: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Start a ddprun on every machine."""
        checkpoints = self.folder / "checkpoints"
        checkpoints.mkdir()
        ours = measuring.clean_environ() | {
            "PYTHONPATH": f"{ROOT / 'trainer'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "DDP_RUN_DIR": str(self.folder), "DDP_RUN_ID": "lost", "DDP_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
            "DDP_CHECKPOINT_DIR": str(checkpoints),
        }  # fmt: skip
        for number, machine in enumerate(self.machines):
            place = ["--nnodes", NODES, "--spares", self.spares, "--node-rank", number]
            place += ["--master-addr", self.machines[0].address, "--master-port", PORT]
            if self.module != "ddprun":
                place = ["--nnodes", NODES, "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d"]
                place += ["--rdzv-id", "lost", "--rdzv-endpoint", f"{self.machines[0].address}:{PORT}"]
                place += ["--rdzv-conf", f"is_host={int(not number)}", "--local-addr", machine.address]
                ours["GLOO_SOCKET_IFNAME"] = "eth0"
            script = [SCRIPT, self.folder, "--steps", STEPS, "--pause", self.pause_s, "--timeout", 60]
            argv = [*map(str, place), *self.options, *map(str, script)]
            self.processes[number] = fork_agent(self.module, machine, argv, ours, self.folder, self.log(number))

    def log(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    def lose(self, number: int) -> float:
        """Lose a machine. Return the time."""
        self.lost.append(number)
        at = time.time()
        self.machines[number].cut()
        self.machines[number].kill()
        return at

    def until(self, condition: Callable[[], object], event: str, timeout_s: float = WAIT_S) -> float:
        """Wait until ``condition()`` is true. Return the time. Raises WrongError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise WrongError(f"{event}: not within {timeout_s:g} s; {self.last_lines()}")
            time.sleep(POLL_S)
        return time.time()

    def last_lines(self) -> str:
        ends = {number: self.log(number).read_text(errors="replace").splitlines()[-1:] for number in self.processes}
        return "; ".join(f"{number}: {''.join(end)}" for number, end in ends.items())

    def steps(self) -> dict[int, dict[int, list[tuple[float, int]]]]:
        """Return the times and numbers of the steps of each process of each rank."""
        made: dict[int, dict[int, list[tuple[float, int]]]] = {rank: {} for rank in range(NODES)}
        for path in (self.folder / "steps").glob("*"):
            lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            made[int(path.stem)][int(path.suffix[1:])] = [(float(at), int(step)) for at, step in lines]
        return made

    def reached(self, step: int, since: float = 0.0) -> bool:
        """Return whether every rank has made ``step``, or a later one, after ``since``."""
        made = self.steps().values()
        return all(any(at > since and n >= step for own in of.values() for at, n in own) for of in made)

    def last_starts(self) -> list[float]:
        """Return the time of the first step of each rank's last process."""
        return [max(own[0][0] for own in of.values() if own) for of in self.steps().values()]

    def train_again(self, since: float) -> None:
        """Wait until a new process of each rank has made a step."""
        self.until(lambda: min(self.last_starts()) > since, "training again")

    def has_ended(self, number: int) -> bool:
        if number not in self.statuses:
            pid, status = os.waitpid(self.processes[number], os.WNOHANG)
            if pid:
                self.statuses[number] = of_status(os.waitstatus_to_exitcode(status))
        return number in self.statuses

    def code(self, number: int) -> int:
        return self.statuses[number]

    def state(self, number: int) -> NodeState | None:
        with contextlib.suppress(OSError, ValueError):
            return read_node((self.folder / f"node-{number}" / "node.json").read_text())
        return None

    def alive(self) -> list[int]:
        return [pid for machine in self.machines for pid in machine.pids()]

    def ends(self, weights: str, codes: dict[int, int], since: float = 0.0) -> float:
        """Wait for the end of the run, and check it. Return how many seconds after ``since`` the ranks trained again.

        ``codes``: those that are not 0.
        """
        self.until(lambda: all(map(self.has_ended, self.processes)), "the end")
        expected = {number: codes.get(number, 137 if number in self.lost else 0) for number in self.processes}
        ended = {number: self.code(number) for number in self.processes}
        if ended != expected:
            raise WrongError(f"exit codes {ended}, expected {expected}; {self.last_lines()}")
        final = {path.name: path.read_text() for path in (self.folder / "weights").glob("*")}
        if weights and final != {str(rank): weights for rank in range(NODES)}:
            raise WrongError("other weights than those of an undisturbed run")
        self.check_one_training()
        self.until(lambda: not self.alive(), "the end of all processes", ORPHANS_S)
        return max(0.0, max(self.last_starts()) - since)

    def check_one_training(self) -> None:
        """Raise WrongError if two processes of a rank have ever trained at the same time."""
        for rank, of in self.steps().items():
            spans = sorted((own[0][0], own[-1][0]) for own in of.values() if own)
            if any(first[1] > second[0] for first, second in itertools.pairwise(spans)):
                raise WrongError(f"two processes of rank {rank} trained at the same time")


def import_modules() -> None:
    """Import what ddprun and its supervisor import, and leave no thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch.distributed.elastic.agent.server.api", "torch._dynamo", "torch.nn.parallel"):
        importlib.import_module(name)


def fork_agent(
    module: str, machine: lab.Machine, argv: list[str], environ: dict[str, str], folder: Path, log: Path
) -> int:
    """Run ``python -m MODULE ARGV`` on a machine, in a process forked from this one. Return its pid."""
    if pid := os.fork():
        return pid
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", machine.namespace).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), "setns")
        socket.sethostname(machine.name)
        for target, descriptor in ((os.devnull, 0), (os.devnull, 1), (str(log), 2)):
            os.dup2(os.open(target, os.O_RDWR | os.O_CREAT), descriptor)
        os.closerange(3, 1024)
        os.chdir(folder)
        os.setsid()
        os.environ.clear()
        os.environ.update(environ)
        sys.argv, sys.orig_argv = [module, *argv], [sys.executable, "-m", module, *argv]
        sys.path.insert(0, str(ROOT / "trainer"))
        runpy.run_module(module, run_name="__main__")
    finally:
        os._exit(70)


@contextlib.contextmanager
def start_run(spares: int, **more: object) -> Iterator[Run]:
    folder = Path(tempfile.mkdtemp(prefix="lost-machines-"))
    with lab.machines(NODES + spares, prefix="lost") as machines:
        run = Run(machines=machines, folder=folder, spares=spares, **more)  # type: ignore[arg-type]
        try:
            run.start()
            yield run
        finally:
            for machine in machines:
                machine.kill()
            run.until(lambda: all(map(run.has_ended, run.processes)), "the end of all ddpruns")
    shutil.rmtree(folder)


def begin(run: Run, dice: random.Random) -> None:
    """Wait until the run trains and its spares wait, and then for a random time."""
    waits = range(NODES, NODES + run.spares)
    run.until(lambda: all((state := run.state(n)) and state.state == "spare" for n in waits), "the spares")
    run.until(lambda: run.reached(3), "the first steps")
    time.sleep(dice.uniform(0, 3))


def lose_one(number: int) -> Callable[[Run, random.Random, str], float]:
    def play(run: Run, dice: random.Random, weights: str) -> float:
        begin(run, dice)
        return run.ends(weights, {}, run.lose(number))

    return play


def cut_one(number: int) -> Callable[[Run, random.Random, str], float]:
    """Cut a cable, and mend it later. The machine ends by itself, and the others train on."""

    def play(run: Run, dice: random.Random, weights: str) -> float:
        begin(run, dice)
        at = time.time()
        run.machines[number].cut()
        mended_s = dice.uniform(5, 14)
        while time.time() < at + mended_s:
            time.sleep(POLL_S)
        run.machines[number].plug_in()
        run.until(lambda: run.has_ended(number), f"the end of machine {number}", max(0.1, at + LIMIT_S - time.time()))
        return run.ends(weights, {number: 137 if number == 0 else 142}, at)

    return play


def lose_two(first: int, second: int) -> Callable[[Run, random.Random, str], float]:
    def play(run: Run, dice: random.Random, weights: str) -> float:
        begin(run, dice)
        run.lose(first)
        time.sleep(dice.uniform(0, 2))
        return run.ends(weights, {}, run.lose(second))

    return play


def lose_spare_too(number: int) -> Callable[[Run, random.Random, str], float]:
    """Lose a machine, and then the spare that takes its place, before it trains."""

    def play(run: Run, dice: random.Random, weights: str) -> float:
        begin(run, dice)
        run.lose(number)
        run.until(lambda: (state := run.state(NODES)) and state.state != "spare", "the spare takes over")
        time.sleep(dice.uniform(0, 1))
        return run.ends(weights, {}, run.lose(NODES))

    return play


def lose_successor(run: Run, dice: random.Random, weights: str) -> float:
    """Lose node 0, and when the ranks train again, the machine of its successor."""
    begin(run, dice)
    run.train_again(run.lose(0))
    time.sleep(dice.uniform(0, 2))
    return run.ends(weights, {}, run.lose(NODES))


def lose_too_many(first: int, second: int) -> Callable[[Run, random.Random, str], float]:
    """Lose more machines than there are spares. The others end within LIMIT_S."""

    def play(run: Run, dice: random.Random, weights: str) -> float:  # noqa: ARG001
        begin(run, dice)
        run.lose(first)
        time.sleep(dice.uniform(0, 2))
        at = run.lose(second)
        others = [number for number in run.processes if number not in (first, second)]
        ended = run.until(lambda: all(map(run.has_ended, others)), "the end of the others", LIMIT_S + 5)
        if {run.code(number) for number in others} - {137, 142}:
            raise WrongError(f"exit codes {[run.code(number) for number in others]}")
        run.check_one_training()
        run.until(lambda: not run.alive(), "the end of all processes", ORPHANS_S)
        return ended - at

    return play


SCENARIOS: dict[str, tuple[int, Callable[[Run, random.Random, str], float]]] = {
    "lose-0": (1, lose_one(0)),
    "lose-1": (1, lose_one(1)),
    "lose-2": (1, lose_one(2)),
    "lose-spare": (1, lose_one(3)),
    "cut-0": (1, cut_one(0)),
    "cut-2": (1, cut_one(2)),
    "cut-spare": (1, cut_one(3)),
    "lose-0-1": (2, lose_two(0, 1)),
    "lose-1-2": (2, lose_two(1, 2)),
    "lose-0-3": (2, lose_two(0, 3)),
    "taking-0": (2, lose_spare_too(0)),
    "taking-1": (2, lose_spare_too(1)),
    "again-0": (2, lose_successor),
    "too-many-0": (1, lose_too_many(0, 1)),
    "too-many-1": (1, lose_too_many(1, 2)),
}


def undisturbed() -> str:
    """Return the weights of a run that loses no machine."""
    with start_run(0, pause_s=0.0) as run:
        run.ends("", {})
        (weights,) = {path.read_text() for path in (run.folder / "weights").glob("*")}
        return weights


def beside(number: int, dice: random.Random) -> str:
    """Lose a machine of torchrun's. Return what became of the run."""
    with start_run(1, module="torch.distributed.run") as run:
        run.until(lambda: run.reached(3), "the first steps")
        time.sleep(dice.uniform(0, 3))
        trains = {int(path.suffix[1:]) for path in (run.folder / "steps").glob("*")}
        ranked = [each for each, machine in enumerate(run.machines) if each and trains & {*machine.pids()}]
        lost = ranked[0] if number else 0  # the first machine has the store, whether it trains or waits
        at, others = run.lose(lost), [each for each in run.processes if each != lost]

        def is_over() -> bool:
            return all(map(run.has_ended, others)) or min(run.last_starts()) > at

        try:
            took_s = run.until(is_over, "training again, or the end", TORCHRUN_S) - at
        except WrongError:
            return f"neither trains again nor has ended after {TORCHRUN_S:.0f} s"
        if min(run.last_starts()) > at:
            return f"trains again after {took_s:.1f} s"
        return f"all agents have ended after {took_s:.1f} s"


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of each scenario")
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true")
    args = parser.parse_args()
    import_modules()
    if args.torchrun:
        for number, turn in itertools.product((1, 0), range(args.rounds)):
            end = beside(number, random.Random(f"{args.seed} {turn}"))  # noqa: S311
            print(f"torchrun loses {'another machine' if number else 'the store'}: {end}", flush=True)
        return
    weights, failed = undisturbed(), 0
    for name in args.only.split(","):
        spares, play = SCENARIOS[name]
        took: list[float] = []
        for number in range(args.rounds):
            dice = random.Random(f"{args.seed} {name} {number}")  # noqa: S311
            try:
                with start_run(spares) as run:
                    took.append(play(run, dice, weights))
                if took[-1] > LIMIT_S:
                    raise WrongError(f"it took {took[-1]:.1f} s")
            except WrongError as error:
                failed += 1
                print(f"{name} round {number}: {error} ({run.folder})", file=sys.stderr, flush=True)
        load, times = os.getloadavg()[0], " ".join(f"{seconds:.1f}" for seconds in took)
        print(f"| {name} | {NODES} + {spares} | {len(took)} of {args.rounds} | {times} | {load:.0f} |", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
