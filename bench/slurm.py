"""Test the target slurm on a Slurm cluster of namespaces (tests/cluster/slurm_lab.py). Needs root, slurm-wlm and munge.

    python bench/slurm.py start [--repeats 3]
    python bench/slurm.py scripts [--number 10000] [--checked 200]

`start` measures the time from sbatch to the first step of 2 nodes x 2 ranks. A script rendered by ddpctl and a
handwritten script take turns. The handwritten script starts torchrun with srun. Goal: the rendered script takes at most
1.05 times as long. The exit code is 0 whatever the numbers are.

`scripts` generates --number scripts and checks them with bash -n. --checked is the number of scripts that are also
checked with shellcheck and sbatch --test-only. Many values in the scripts are commands that create a file. A shell runs
such a command if the script does not quote the value. Goals: no script is refused, and no such file exists.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measuring

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "cli"), str(ROOT / "trainer")]

from tests.cluster import slurm_lab  # noqa: E402

from ddpctl.job.launch_plan import Plan  # noqa: E402
from ddpctl.job.spec import JobSpec  # noqa: E402
from ddpctl.targets.slurm.batch_script import render_script  # noqa: E402
from ddpctl.targets.slurm.options import SlurmOptions  # noqa: E402

WORLD = range(4)
LIMIT_S = 120.0
FIRST_STEP = str(ROOT / "bench" / "first_step.py")
# A script as in the manuals of clusters.
BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --output=/dev/null
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task=2 {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-id="$SLURM_JOB_ID" \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:29500" {script} {folder} 1
"""
TEXTS = ["$(touch {canary})", "`touch {canary}`", "'; touch {canary}; '", '"; touch {canary}; "', "\ntouch {canary}\n",
         "CHECK\ntouch {canary}\n", "\nNODE\ntouch {canary}\n", "a b", "${{IFS}}", "é\t#", "\\", "--x=%j"]  # fmt: skip


def time_start(slurm: slurm_lab.Slurm, script: str, folder: Path) -> float:
    """Return the seconds from sbatch to the last rank's first step."""
    started = time.time()
    done = slurm.run("sbatch", "--parsable", script, env={"PYTHON": sys.executable, "RUN_DIR": str(folder / "run")})
    if done.returncode:
        raise SystemExit(f"slurm.py: {done.stderr}")
    files = [folder / f"0.{rank}" for rank in WORLD]
    measuring.wait_until(
        lambda: all(path.exists() for path in files), "the first step", timeout_s=LIMIT_S, pause_s=0.005
    )
    seconds = max(float(path.read_text().split()[0]) for path in files) - started
    measuring.wait_until(
        lambda: not slurm.run("squeue", "--noheader").stdout.strip(), "an empty queue", timeout_s=LIMIT_S, pause_s=0.1
    )
    return seconds


def start(repeats: int) -> None:
    columns: dict[str, list[float]] = {"rendered": [], "by hand": []}
    with slurm_lab.cluster(2, prefix="benchslurm") as slurm, tempfile.TemporaryDirectory() as top:
        for repeat, name in measuring.in_turns(list(columns), repeats):
            folder = Path(top) / f"{repeat}-{name}".replace(" ", "-")
            folder.mkdir()
            job = JobSpec(nodes="2", gpus=2, cpus=2, command=(FIRST_STEP, str(folder), "1"))
            plan = Plan(name="first", job=job, cwd=top, folder=str(folder / "run"), checkpoint_dir=top)
            text = render_script(plan, SlurmOptions()).replace("#SBATCH --requeue", "#SBATCH --output=/dev/null")
            if name == "by hand":
                text = BY_HAND.format(python=sys.executable, script=FIRST_STEP, folder=folder)
            script = folder / "job.sbatch"
            script.write_text(text)
            columns[name].append(time_start(slurm, str(script), folder))
    print(f"2 nodes x 2 ranks, gloo, {measuring.machine()}")
    print(measuring.head("seconds from sbatch to the first step", 40, 7))
    for name, seconds in columns.items():
        print(measuring.row(name, seconds, 40, "7.2f"))
    ratio = statistics.median(columns["rendered"]) / statistics.median(columns["by hand"])
    print(f"rendered / by hand: {ratio:.2f} (goal: at most 1.05)")


def configuration(dice: random.Random, canary: Path) -> tuple[JobSpec, SlurmOptions]:
    """Return a random job. Many of its values are commands that a shell would run if they were not quoted."""

    def text() -> str:
        return dice.choice(TEXTS).format(canary=canary)

    job = JobSpec(
        nodes=dice.choice(["1", "2", "1:2"]),
        gpus=dice.randint(1, 2),
        cpus=dice.choice([None, 2, 8]),
        device=dice.choice(["auto", "cuda", "cpu"]),  # type: ignore[arg-type]
        command=("-m", "x", *(text() for _ in range(dice.randint(0, 4)))),
        env={f"X{number}": text() for number in range(dice.randint(0, 3))},
        memory=dice.choice([None, "1Gi"]),
        mounts=tuple(f"/data/{number}'$(x):/d{number}" for number in range(dice.randint(0, 2))),
        secrets=dice.choice([(), ("TOKEN",)]),
        time_limit=dice.choice([None, "12h", "90m"]),
    )
    options = SlurmOptions(
        runtime=dice.choice(["none", "pyxis", "apptainer", "podman", "docker"]),  # type: ignore[arg-type]
        runtime_args=tuple(f"--x={text()}".replace("\n", " ") for _ in range(dice.randint(0, 2))),
        python=dice.choice([None, "/a b/$(x)/python"]),
        modules=dice.choice([(), ("cuda/12.4",)]),
        array=dice.choice([None, "0-3%2"]),
        exclusive=dice.random() < 0.2,
        partition=dice.choice([None, "debug"]),
        prometheus=dice.choice([None, "/tmp/'$(x)"]),  # noqa: S108
        extra=dice.choice([(), ("--mail-type=NONE", "--nice=0")]),
        requeues=dice.choice([0, 3, 100]),
    )
    return job, options


def scripts(number: int, checked: int) -> None:
    dice = random.Random(7)  # noqa: S311
    failures: list[str] = []
    with slurm_lab.cluster(2, prefix="benchslurm") as slurm, tempfile.TemporaryDirectory() as top:
        canary = Path(top) / "canary"
        texts = []
        for _ in range(number):
            job, options = configuration(dice, canary)
            plan = Plan(name="r", job=job, cwd=".", folder=".", checkpoint_dir=".")
            texts.append(render_script(plan, options))

        def parse(text: str) -> str:
            done = subprocess.run(["/bin/bash", "-n"], input=os.fsencode(text), capture_output=True, check=False)
            return done.stderr.decode(errors="replace")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures += filter(None, pool.map(parse, texts))
        print(f"bash -n: {number} scripts, {len(set(texts))} of them distinct, {len(failures)} refused")
        some = list(dict.fromkeys(texts))[:checked]
        for index, text in enumerate(some):
            script = Path(top) / f"{index}.sbatch"
            script.write_text(text)
        files = [str(Path(top) / f"{index}.sbatch") for index in range(len(some))]
        shellcheck = Path(sys.executable).with_name("shellcheck")
        linted = subprocess.run([shellcheck, "--severity=warning", *files], capture_output=True, text=True, check=False)
        print(f"shellcheck: {len(files)} scripts, exit code {linted.returncode}")
        tested = [slurm.run("sbatch", "--test-only", file) for file in files]
        refused = [f"{done.stderr}" for done in tested if done.returncode]
        print(f"sbatch --test-only: {len(files)} scripts, {len(refused)} refused")
        print(f"canary: {'there' if canary.exists() else 'none'}")
        failures += refused + ([linted.stdout] if linted.returncode else [])
        if failures or canary.exists():
            raise SystemExit("\n".join(failures[:3]))


def main() -> None:
    parser = measuring.options(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("start").add_argument("--repeats", type=int, default=3)
    generated = verbs.add_parser("scripts")
    generated.add_argument("--number", type=int, default=10_000)
    generated.add_argument("--checked", type=int, default=200)
    args = parser.parse_args()
    if reason := slurm_lab.missing():
        raise SystemExit(f"slurm.py: {reason}")
    start(args.repeats) if args.verb == "start" else scripts(args.number, args.checked)


if __name__ == "__main__":
    main()
