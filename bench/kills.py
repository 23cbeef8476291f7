"""Measure the cost of SIGKILLs: ddprun runs ddptrain on several ranks, and random ranks are killed at random steps.

Compares the final weights with those of an undisturbed run, and counts the repeated steps.

    python bench/kills.py [--ranks 3] [--kills 20] [--epochs 20] [--every 7] [--seed 0] [--json FILE]
    python bench/kills.py --sharded [--ranks 4] [--kills 60]
    python bench/kills.py --soak 600 [--ranks 3]

The exit code is 1 if the weights differ, or if the run ends before all kills.

--sharded: train with --strategy fsdp, and kill only while a checkpoint is written. Each kill hits a random rank,
ddprun, or all of them at once; the last two need a new ddprun. The exit code is 0 only if all of this is true:

- the training continues from the newest checkpoint that was complete before the kill, or from the one that was written
- before each new ddprun and at the end, each complete checkpoint is, bit for bit, that of the same step of the
  undisturbed run
- at the end, no unfinished or corrupt file is left
- the weights are those of the undisturbed run

--soak S: run a training that would take about S seconds without the kills. It saves a checkpoint every 2 s, and one of
its ranks is killed every 20 s. The exit code is 0 only if all of this is true:

- the training finishes
- the effective training time ratio is at least 0.6 (see below)
- ddprun has at most as many open files before the last three kills as before the first three
- after the last three kills, the training takes at most three times as long to continue as after the first three

The effective training time ratio is the time that all steps take without kills, divided by the time from the first step
to the end of the training. It is meaningful only on an idle machine.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
from measuring import runtime_files, start_python, wait_until

from ddprank.heartbeat import read_beat
from ddpwire.run_files import node_name, rank_heartbeat, read_node

STEPS_PER_EPOCH = 45  # of the digits
TIMEOUT_S = 180.0
KILL_EVERY_S = 20.0


class Run:
    """One ddprun with its ranks. They run ddptrain, or another ``script``."""

    def __init__(self, folder: Path, ranks: int, *options: str, script: tuple[str, ...] = ("-m", "ddptrain")) -> None:
        self.folder = folder
        self.ranks = ranks
        self.node = folder / "run" / node_name(0)
        environ = measuring.clean_environ() | {"DDP_RUN_DIR": str(folder / "run")}
        self.log = folder / "log"
        self._arguments = ["-m", "ddprun", "--nproc-per-node", str(ranks), *script, *options]
        self._environ = environ
        self.start()

    def start(self) -> None:
        """Start ddprun, or start it again in the same folder."""
        with self.log.open("a") as out:
            self.process = start_python(self._arguments, cwd=self.folder, stdout=out, stderr=out, env=self._environ)

    def until(self, condition: Callable[[], bool], event: str) -> bool:
        """Wait for a condition. Return whether it became true before the run ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                raise SystemExit(f"kills.py: {event} did not happen within {TIMEOUT_S:g} s:\n{self.log.read_text()}")
            time.sleep(0.01)
        return False

    def step(self) -> int:
        """Return the last step of rank 0 in the current attempt."""
        beat = next(map(read_beat, runtime_files(self.node.parent, rank_heartbeat(0))), None)
        return beat.step or 0 if beat else 0

    def attempts(self) -> int:
        return self.log.read_text().count(f"ranks 0 to {self.ranks - 1} of {self.ranks} started")

    def rank_pids(self) -> dict[int, int]:
        """Return the process of each rank."""
        return {entry.rank: entry.pid for entry in read_node((self.node / "node.json").read_text()).ranks}

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self.rank_pids()[rank], signal.SIGKILL)

    def end(self) -> str:
        """Wait for the end. Return the output."""
        try:
            code = self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
        if code:
            raise SystemExit(f"kills.py: ddprun exited with {code}:\n{self.log.read_text()}")
        return self.log.read_text()


def disturb(run: Run, *, kills: int, num_steps: int, chance: random.Random) -> list[tuple[int, int]]:
    """Divide the run into ``kills`` parts, and kill a random rank in a random step of each part.

    Return the step and the rank of each kill."""
    done: list[tuple[int, int]] = []
    for number in range(kills):
        low, high = (num_steps * at // kills for at in (number, number + 1))
        step, rank = chance.randrange(low + 1, high), chance.randrange(run.ranks)
        if not run.until(lambda: run.attempts() == number + 1, "the next start"):  # noqa: B023
            break
        if not run.until(lambda: run.step() >= step, f"step {step}"):  # noqa: B023
            break
        at = run.step()
        run.kill(rank)
        done.append((at, rank))
    return done


def tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint, whose files are verified, by their path in it."""
    from ddptrain.checkpoint import load_checkpoint, map_tensors, whole

    values: dict[str, Any] = {}
    map_tensors(whole(load_checkpoint(path).parts), lambda place, tensor: values.setdefault(repr(place), tensor))
    return values


def differing(folder: Path, undisturbed: Path) -> list[str]:
    """Return the names of checkpoints in ``folder`` that differ from those of the same step, or are not intact.

    The next start completes a checkpoint that has its manifest but not all of its files, so such a one is left out.
    """
    import torch

    from ddptrain.checkpoint import UnusableCheckpoint

    names = []
    for manifest in sorted(folder.glob("step-*.json")):
        name = manifest.with_suffix(".pt").name
        if list(folder.glob(f".{manifest.stem}.*.part")):
            continue
        try:
            mine, other = tensors(folder / name), tensors(undisturbed / name)
        except UnusableCheckpoint as error:
            names.append(f"{name} ({error})")
            continue
        if mine.keys() != other.keys() or not all(torch.equal(mine[key], other[key]) for key in mine):
            names.append(name)
    return names


def kill_while_writing(run: Run, checkpoints: Path, chance: random.Random) -> tuple[str, list[int], int, int] | None:
    """Kill a rank, ddprun, or all of them at a random moment of the write of a checkpoint.

    Return who was killed, the pids of the ranks, the newest step that was complete, and the number of files that were
    not. Return None if the run ended before.
    """

    def newest() -> Path | None:
        return max((path for path in checkpoints.glob("step-*.pt") if path.with_suffix(".json").exists()), default=None)

    def unfinished() -> list[Path]:
        return list(checkpoints.glob(".step-*.part"))

    interval_s = 0.0
    for _ in range(2):  # two writes are let through: the restarts of a run without progress are limited
        before, began = newest(), time.monotonic()
        if not run.until(lambda: newest() != before, "a checkpoint"):  # noqa: B023
            return None
        interval_s = time.monotonic() - began
    time.sleep(chance.random() * interval_s)
    if not run.until(lambda: bool(unfinished()), "the next write"):
        return None
    complete, pids = newest(), list(run.rank_pids().values())
    victim = chance.choice(("rank", "ddprun", "all"))
    for pid in {"rank": [chance.choice(pids)], "ddprun": [run.process.pid], "all": [run.process.pid, *pids]}[victim]:
        os.kill(pid, signal.SIGKILL)
    return victim, pids, int(complete.stem[len("step-") :]) if complete else 0, len(unfinished())


def sharded(ranks: int, kills: int, chance: random.Random, results: Path | None) -> bool:
    """Kill while sharded checkpoints are written. Print the outcome; return whether all of it is as documented."""
    options = (
        "--deterministic", "--device=cpu", "--strategy=fsdp", "--data=text", "--data-dir=text.txt", "--layers=2",
        "--width=96", "--heads=2", "--context=16", "--batch-size=16", "--ema=0.9", "--checkpoint-every=2",
        f"--epochs={2 + kills // 7}",
    )  # fmt: skip
    text = " ".join(f"{number} times {number} is {number * number}." for number in range(450))
    wrong: list[str] = []
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as calm_folder, tempfile.TemporaryDirectory() as other_folder:
        for folder in (calm_folder, other_folder):
            Path(folder, "text.txt").write_text(text)
        calm = Run(Path(calm_folder), ranks, *options, "--keep=0")
        undisturbed = calm.node.parent / "checkpoints"
        calm_weights = fingerprint(calm.end())
        run = Run(Path(other_folder), ranks, *options)
        checkpoints = run.node.parent / "checkpoints"
        lost: list[int] = []
        try:
            while sum(killed.values()) < kills:
                if not (kill := kill_while_writing(run, checkpoints, chance)):
                    wrong.append("the run ended before all kills")
                    break
                victim, pids, newest, num_parts = kill
                killed[victim] += 1
                number, started = sum(killed.values()), len(re.findall("continuing at step", run.log.read_text()))
                if victim != "rank":
                    run.process.wait(TIMEOUT_S)
                    gone = lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)  # noqa: B023, E731
                    wait_until(gone, "the end of the ranks", timeout_s=TIMEOUT_S)  # they may end a write
                    names = differing(checkpoints, undisturbed)
                    wrong += [f"kill {number} of {victim}: {name} is not that of its step" for name in names]
                    run.start()
                run.until(lambda: len(resumed(run)) > started, "the next start")  # noqa: B023
                lost.append(newest - resumed(run)[-1])
                if lost[-1] > 0:
                    wrong.append(
                        f"kill {number} of {victim}: step {newest} was complete; resumed at {resumed(run)[-1]}"
                    )
                print(f"kill {number:2} of {victim:6} with {num_parts} unfinished files after step {newest}: "
                      f"resumed at step {resumed(run)[-1]}", flush=True)  # fmt: skip
        except BaseException:
            run.process.terminate()
            raise
        weights = fingerprint(run.end())
        wrong += [f"at the end: {name} is not that of its step" for name in differing(checkpoints, undisturbed)]
        rest = [path.name for pattern in (".step-*", "*.bad") for path in checkpoints.glob(pattern)]
        wrong += [f"at the end: {name} is left" for name in rest]
    equal = weights == calm_weights
    if not equal:
        wrong.append("the weights differ")
    print(f"text, fsdp, {ranks} ranks, gloo, a checkpoint every 2 steps, {measuring.machine()}")
    print(f"kills            {dict(killed)}; the write that was interrupted was completed {lost.count(-2)} times")
    print(f"weights          {weights}, undisturbed {calm_weights}: {'equal' if equal else 'DIFFERENT'}")
    print(f"wrong            {len(wrong)}", *wrong, sep="\n  ")
    measuring.write_json(results, {"kills": killed, "lost": lost, "wrong": wrong})
    return not wrong


def resumed(run: Run) -> list[int]:
    """Return the step from which each restarted training continued."""
    return [int(step) - 1 for step in re.findall(r"continuing at step (\d+) of", run.log.read_text())]


def open_files(pid: int) -> int:
    """Return the number of open files of a ddprun and of its first child, which forks the ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(len(list(Path(f"/proc/{process}/fd").iterdir())) for process in (pid, *children[:1]))


def soak(seconds: float, ranks: int, chance: random.Random) -> bool:
    """Kill a rank every 20 s, and print what that costs. Return whether the cost is within the limits."""
    with tempfile.TemporaryDirectory() as calm_folder, tempfile.TemporaryDirectory() as killed_folder:
        calm = Run(Path(calm_folder), ranks, "--device=cpu", "--epochs=1000000")
        calm.until(lambda: calm.step() > 200, "step 200")
        first, began = calm.step(), time.monotonic()
        time.sleep(20)
        steps_per_s = (calm.step() - first) / (time.monotonic() - began)
        calm.process.terminate()
        calm.process.wait(TIMEOUT_S)
        epochs = max(1, round(seconds * steps_per_s / STEPS_PER_EPOCH))
        every = f"--checkpoint-every={max(1, round(2 * steps_per_s))}"
        run, files = Run(Path(killed_folder), ranks, "--device=cpu", every, f"--epochs={epochs}"), []
        run.until(lambda: run.step() > 0, "the first step")
        began = killed_at = time.monotonic()
        while run.until(lambda: time.monotonic() > killed_at + KILL_EVERY_S, "the next kill"):  # noqa: B023
            if not run.until(lambda: run.attempts() == len(files) + 1, "the next start"):
                break
            files.append(open_files(run.process.pid))
            run.kill(chance.randrange(ranks))
            killed_at = time.monotonic()
        again_s = [float(took) for took in re.findall(r"training again at step \d+, ([\d.]+) s after", run.end())]
        took_s = time.monotonic() - began
    ratio = epochs * STEPS_PER_EPOCH / steps_per_s / took_s
    print(f"{len(files)} kills in {took_s:.0f} s; {epochs * STEPS_PER_EPOCH} steps, {steps_per_s:.1f}/s undisturbed")
    print(f"effective training time ratio {ratio:.2f}; open files before each kill: {files}")
    print(f"seconds from each kill until the training continues: {again_s}")
    return ratio >= 0.6 and max(files[-3:]) <= max(files[:3]) and max(again_s[-3:]) <= 3 * max(again_s[:3])


def fingerprint(text: str) -> str:
    return re.findall(r"weights sha256 ([0-9a-f]{16})", text)[-1]


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--ranks", type=int, help="3, or 4 with --sharded; with 2, the order of a sum cannot be seen")
    parser.add_argument("--kills", type=int, help="20, or 60 with --sharded")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    parser.add_argument("--sharded", action="store_true")
    args = parser.parse_args()
    args.ranks = args.ranks or (4 if args.sharded else 3)
    args.kills = args.kills or (60 if args.sharded else 20)
    if args.sharded:
        sys.exit(not sharded(args.ranks, args.kills, random.Random(args.seed), args.json))  # noqa: S311
    if args.soak:
        sys.exit(not soak(args.soak, args.ranks, random.Random(args.seed)))  # noqa: S311
    options = ("--deterministic", f"--epochs={args.epochs}", f"--checkpoint-every={args.every}", "--device=cpu")
    with tempfile.TemporaryDirectory() as whole_folder, tempfile.TemporaryDirectory() as killed_folder:
        whole = fingerprint(Run(Path(whole_folder), args.ranks, *options).end())
        run = Run(Path(killed_folder), args.ranks, *options)
        chance = random.Random(args.seed)  # noqa: S311
        try:
            done = disturb(run, kills=args.kills, num_steps=args.epochs * STEPS_PER_EPOCH, chance=chance)
        except BaseException:
            run.process.terminate()
            raise
        text = run.end()
        steps = resumed(run)
    lost = [at - step for (at, _), step in zip(done, steps, strict=False)]
    equal = fingerprint(text) == whole
    print(
        f"digits, {args.ranks} ranks, gloo, {args.epochs * STEPS_PER_EPOCH} steps, a checkpoint every {args.every}, "
        f"{measuring.machine()}"
    )
    print(f"kills            {len(done)} (of rank 0: {sum(rank == 0 for _, rank in done)})")
    print(f"steps lost       {sum(lost)} in all, at most {max(lost, default=0)} by a kill")
    print(f"weights          {fingerprint(text)}, undisturbed {whole}: {'equal' if equal else 'DIFFERENT'}")
    result = {"kills": done, "resumed": steps, "lost": lost, "equal": equal, "every": args.every}
    measuring.write_json(args.json, result)
    sys.exit(0 if equal and len(done) == args.kills else 1)


if __name__ == "__main__":
    main()
