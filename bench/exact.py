"""Check that a training that continues after a kill or a stop ends with the same weights as an undisturbed training.

    python bench/exact.py [--groups ranks,models,moments,communication,ways] [--rows REGEX] [--json FILE] [--write]
    python bench/exact.py --groups device --device cuda

All trainings run with --deterministic and gloo, those of the group ``device`` with one rank. Each row trains twice on
the same number of ranks: once undisturbed, and once with a rank that gets signals at chosen moments (exact_rank.py).
After a signal, the training continues in one of three ways: ddprun starts the ranks again (after a SIGKILL only), the
same command is run again, or ``ddpctl launch --resume`` is run. After a SIGTERM, all ranks save before they stop.

--rows selects the rows whose title matches the regular expression. --write puts the table into docs/results/faults.md.
The exit code is 1 if any weights differ. Kills at random moments: bench/kills.py.
"""

import functools
import platform
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring

PAGE = Path(__file__).parent.parent / "docs" / "results" / "faults.md"
RANK = str(Path(__file__).with_name("exact_rank.py"))
TIMEOUT_S = 280.0
STARTS = 4  # of one training
KILLS = 10  # at random steps, for each way of communication

DIGITS = ("--epochs=2", "--checkpoint-every=10")  # 45 steps an epoch
SYNTHETIC = ("--data=synthetic", "--epochs=2", "--checkpoint-every=3", "--lr=0.02")


def synthetic(shape: str, *options: str, steps: int = 6, batch: int = 24) -> tuple[str, ...]:
    """Return ddptrain's options for a training on generated images, with ``steps`` steps per epoch."""
    size = (f"--synthetic-shape={shape}", f"--synthetic-samples={steps * batch}", f"--batch-size={batch}")
    return (*SYNTHETIC, *size, *options)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training, the signals that it gets, and how it is continued. In the signals (exact_rank.py), R is the last
    rank.
    """

    group: str
    title: str
    events: tuple[str, ...]
    ranks: tuple[int, int] = (1, 3)  # nodes, ranks a node
    options: tuple[str, ...] = DIGITS
    way: str = "restart"  # restart (by ddprun) | command (the same one again) | resume (ddpctl launch --resume)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The hashes of a row's weights, and how often the disturbed training was started."""

    row: Row
    undisturbed: str
    disturbed: str
    starts: int

    @property
    def equal(self) -> bool:
        return self.undisturbed == self.disturbed


MIDDLE = ("KILL@saved:37@R",)
MODEL = ("KILL@saved:5@R",)
CONVNET, COLOUR = "1x16x16", "3x32x32"
ROWS = (
    *(Row(group="ranks", title=f"{n} rank{'s' * (n > 1)}", events=MIDDLE, ranks=(1, n)) for n in range(1, 6)),
    Row(group="ranks", title="2 x 2 ranks", events=MIDDLE, ranks=(2, 2)),
    Row(group="ranks", title="2 x 3 ranks", events=MIDDLE, ranks=(2, 3)),
    *(
        Row(group="models", title=title, events=MODEL, options=synthetic(shape, *options))
        for title, shape, *options in (
            ("simple", CONVNET, "--model=simple"),
            ("convnet: batch norm, average of the weights", CONVNET, "--model=convnet", "--ema=0.9"),
            (
                "convnet: many small buckets, gradients are not views of the buckets",
                CONVNET,
                "--model=convnet",
                "--bucket-mb=0.01",
                "--no-bucket-view",
            ),
            ("convnet: static graph", CONVNET, "--model=convnet", "--static-graph", "--bucket-mb=0.01"),
            (
                "convnet: mixup, cutmix, cutout, erase, --input loader",
                CONVNET,
                "--model=convnet",
                "--mixup=0.2",
                "--cutmix=1",
                "--cutout=4",
                "--erase=0.3",
                "--flip",
                "--shift=2",
                "--input=loader",
            ),
            ("imageclassifier: gradients in bf16", COLOUR, "--model=imageclassifier", "--compress=bf16"),
            ("imageclassifier: AdamW, clipping", COLOUR, "--model=imageclassifier", "--optimizer=adamw", "--clip=1"),
            ("resnet18: accumulation", COLOUR, "--model=resnet18", "--accumulate=2"),
            ("resnet18: bf16, recompute", COLOUR, "--model=resnet18", "--precision=bf16", "--recompute"),
            ("resnet18: not channels_last", COLOUR, "--model=resnet18", "--no-channels-last"),
            ("efficientnet_b0: dropout, stochastic depth", COLOUR, "--model=torchvision:efficientnet_b0"),
        )
    ),
    Row(
        group="models",
        title="vit_b_16: 86 million parameters, stopped",  # a kill would come before 1 GB is on the disk
        events=("TERM@step:2@R",),
        way="command",
        options=synthetic("3x32x32", "--model=torchvision:vit_b_16", "--optimizer=adamw", steps=3, batch=6),
    ),
    *(
        Row(group="moments", title=f"{deed} {moment}", events=events, way=way)
        for deed, name, way in (("killed", "KILL", "restart"), ("stopped", "TERM", "command"))
        for moment, events in (
            ("at the first step", (f"{name}@step:1@R",)),
            ("in the middle of an epoch", (f"{name}@saved:23@R",)),
            ("at the last step of an epoch", (f"{name}@saved:45@R",)),
            ("in the evaluation", (f"{name}@evaluation:1@R",)),
            ("while a checkpoint's data is written", (f"{name}@data:20@0",)),
            ("while a checkpoint is renamed", (f"{name}@manifest:20@0",)),
            ("twice in a row", (f"{name}@saved:31@R", f"{name}@step:32@0")),
        )
    ),
    *(
        Row(
            group="communication",
            title=f"{way}, {end} in step {step}",
            events=(f"{event}:{step}@R",),
            way=how,
            options=synthetic(CONVNET, "--model=convnet", f"--communication={way}", steps=15),
        )
        for way in ("bf16", "powersgd:2", "localsgd:4", "diloco:4")
        for end, event, how, step in (
            *(("killed", "KILL@saved", "restart", step) for step in random.Random(45).sample(range(4, 31), KILLS)),  # noqa: S311
            ("stopped", "TERM@step", "command", 23),  # between two exchanges of weights
        )
    ),
    Row(group="ways", title="killed, the same command again", events=MIDDLE, way="command"),
    Row(group="ways", title="killed, ddpctl launch --resume", events=MIDDLE, ranks=(2, 2), way="resume"),
    Row(group="ways", title="stopped, ddpctl launch --resume", events=("TERM@step:37@R",), ranks=(2, 2), way="resume"),
)


def on_device(device: str) -> tuple[Row, ...]:
    """Return the group ``device``: trainings with one rank on the CPU or on a GPU."""
    return tuple(
        Row(group="device", title=title, events=MODEL, ranks=(1, 1), options=(*options, f"--device={device}"))
        for title, options in (
            ("convnet: AdamW", synthetic(CONVNET, "--model=convnet", "--optimizer=adamw")),
            ("resnet18: bf16", synthetic(COLOUR, "--model=resnet18", "--precision=bf16")),
        )
    )


def run_python(arguments: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments, with the options of subprocess.run."""
    return subprocess.run([sys.executable, *arguments], check=False, **options)


def started(arguments: Sequence[str], folder: Path, codes: tuple[int, ...]) -> tuple[int, str]:
    """Start a training once, with Python's arguments. Return its exit code and output. End the benchmark if the code is
    not in ``codes``.
    """
    environ = measuring.clean_environ() | {"DDPCTL_STATE_DIR": str(folder / "runs"), "DDP_DEVICE": "cpu"}
    done = run_python(
        arguments,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode not in codes:
        sys.exit(f"exact.py: python {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}")
    return done.returncode, done.stdout


def weights(text: str) -> str:
    """Return the hash of the final weights in the output of a training."""
    return re.findall(r"weights sha256 ([0-9a-f]{16})", text)[-1]


def stopped_in_the_middle(folder: Path, ranks: int) -> Path:
    """Start a training with the options DIGITS on one node, and stop it in step 37. Return the folder of its
    checkpoints.
    """
    how = [f"--nproc-per-node={ranks}", "--run-dir=run", RANK, str(folder / "events"), "TERM@step:37@0", "--"]
    started(["-m", "ddprun", *how, "--deterministic", *DIGITS], folder, (143,))
    return folder / "run" / "checkpoints"


def train(row: Row, folder: Path, events: Sequence[str]) -> tuple[str, int]:
    """Train to the end, and continue after each signal as the row says. Return the weights' hash and the number of
    starts.
    """
    nodes, here = row.ranks
    given = [event.replace("@R", f"@{nodes * here - 1}") for event in events]
    script = [RANK, str(folder / "events"), *given, "--", "--deterministic", *row.options]
    max_restarts = 3 if row.way == "restart" else 0
    if nodes == 1 and row.way != "resume":
        how = [f"--nproc-per-node={here}", f"--max-restarts={max_restarts}", "--run-dir=run"]
        first = again = ["-m", "ddprun", *how, *script]
    else:
        place = ["--nodes", str(nodes), "--gpus", str(here), "--device", "cpu", "--name", "exact"]
        (folder / "ddpctl.yaml").write_text(f"job: {{max_restarts: {max_restarts}}}\n")
        first = ["-m", "ddpctl", "launch", *place, "--", *script]
        again = ["-m", "ddpctl", "launch", "--resume", "exact"]
    ends = {"KILL": 137, "TERM": 143}
    codes = (0,) if row.way == "restart" else (0, *(ends[event.split("@")[0]] for event in events))
    command, text = first, ""
    for _ in range(STARTS):
        code, output = started(command, folder, codes)
        text += output
        if code == 0:
            break
        command = again
    happened = sorted(path.name for path in (folder / "events").iterdir())
    assert happened == sorted(event.rpartition("@")[0] for event in events), (happened, text)
    resumed = text.count("continuing at step")
    if not resumed and events and "KILL@step:1@R" not in events:
        sys.exit(f"exact.py: {row.title}: the training continued from no checkpoint:\n{text}")
    return weights(text), resumed + 1


@functools.cache
def undisturbed(ranks: tuple[int, int], options: tuple[str, ...]) -> str:
    """Return the hash of the weights of a training that gets no signal."""
    with tempfile.TemporaryDirectory() as folder:
        row = Row(group="", title="undisturbed", events=(), ranks=ranks, options=options)
        return train(row, Path(folder), ())[0]


def try_row(row: Row) -> Tried:
    with tempfile.TemporaryDirectory() as folder:
        disturbed, starts = train(row, Path(folder), row.events)
    return Tried(row=row, undisturbed=undisturbed(row.ranks, row.options), disturbed=disturbed, starts=starts)


def table(tries: Sequence[Tried]) -> str:
    lines = [
        f"Measured with Python {platform.python_version()}, gloo, {measuring.machine()}.",
        "",
        "| training | ranks | starts | undisturbed | disturbed | |",
        "|---|---|---|---|---|---|",
    ]
    for tried in tries:
        ranks = f"{tried.row.ranks[0]} x {tried.row.ranks[1]}" if tried.row.ranks[0] > 1 else str(tried.row.ranks[1])
        same = "equal" if tried.equal else "DIFFERENT"
        lines.append(
            f"| {tried.row.title} | {ranks} | {tried.starts} | {tried.undisturbed} | {tried.disturbed} | {same} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    groups = list(dict.fromkeys(row.group for row in ROWS))
    parser = measuring.options(__doc__)
    parser.add_argument("--groups", default=",".join(groups))
    parser.add_argument("--rows", default="")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the group device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    every = (*ROWS, *on_device(args.device))
    rows = [row for row in every if row.group in args.groups.split(",") and re.search(args.rows, row.title)]
    if not rows:
        parser.error(f"no row of {args.groups} is found by {args.rows!r}")
    tries = []
    for row in rows:
        tries.append(try_row(row))
        same = "equal" if tries[-1].equal else "DIFFERENT"
        print(f"{row.title}: {tries[-1].undisturbed} {tries[-1].disturbed} {same}", file=sys.stderr, flush=True)
    print(table(tries))
    result = [
        {
            "title": tried.row.title,
            "undisturbed": tried.undisturbed,
            "disturbed": tried.disturbed,
            "starts": tried.starts,
        }
        for tried in tries
    ]
    measuring.write_json(args.json, {"rows": result})
    if args.write:
        measuring.write_table(PAGE, "exact.py", table(tries))
    sys.exit(not all(tried.equal for tried in tries))


if __name__ == "__main__":
    main()
