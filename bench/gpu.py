"""Show what holds on a machine with one GPU. Each step is a command with a time-out; its log is kept.

    python bench/gpu.py [--part 1] [--only NAME,...] [--within S] [--cpu] [--wheels DIR] [--data-dir DIR] [--out DIR]
    python bench/gpu.py --list
    python bench/gpu.py --download DIR

The steps of part 1 take at most nine minutes, and the most important ones come first. After each step, ``results.json``
and ``results.md`` are written into --out. A step that fails does not end the run. No step needs a network. Part 3
measures the accuracy of the speed runs if --data-dir has CIFAR-10.

Libraries that this Python lacks are installed from --wheels into --out. ``--download`` collects these wheels on another
machine, for Python 3.12 on Linux (x86_64). This project is imported from the checkout.

The exit code is 0 if every step passes, 1 if a step fails, and 78 without a GPU. With --cpu, each step runs its CPU
form, which has the same commands and proves nothing about a GPU.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import measuring

ROOT = Path(__file__).parent.parent
PART_S = 540.0  # for part 1, with the installation
INSTALL_S, PROBE_S = 30.0, 30.0
CPU_FACTOR = 6.0  # a CPU may be shared, and its time-outs protect against hangs only
KILL_S = 5.0  # for a step's processes after SIGTERM
LINE_CHARS = 110
NO_GPU = 78  # ddpwire.exits.Exit.CONFIG; that package is not installed yet
# Modules that a machine with torch may lack, and the packages that have them.
MODULES = {
    "annotated_types": "annotated-types",
    "fabric": "fabric",
    "jinja2": "jinja2",
    "paramiko": "paramiko",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
    "rich": "rich",
    "sklearn": "scikit-learn",
    "typer": "typer",
    "yaml": "pyyaml",
}
TOO_LARGE = ("scikit-learn",)  # with scipy and numpy, it is larger than all others together, and no step needs it
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of Python. {device} is cuda or cpu, {json} the file for the step's numbers, {data} the --data-dir."""

    name: str
    shows: str
    command: tuple[str, ...]
    timeout_s: float
    part: int = 1
    cpu: tuple[str, ...] = ()  # further arguments of the CPU form

    def arguments(self, device: str, numbers: Path, data: str = "") -> list[str]:
        """Return the arguments of Python."""
        given = [*self.command, *(self.cpu if device == "cpu" else ())]
        return [argument.format(device=device, json=numbers, data=data) for argument in given]


def check(name: str) -> tuple[str, ...]:
    return ("bench/gpu_checks.py", name, "--device={device}", "--json={json}")


TESTS = ("-m", "pytest", "-q", "-c", os.devnull, "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider")
STEPS = (
    Step(
        name="backends",
        shows="ddprun with a rank under NCCL, and two gloo ranks on one GPU; what flight recorders keep of them",
        command=check("backends"),
        timeout_s=45,
    ),
    Step(
        name="tests",
        shows="the unit tests that need a GPU",
        command=(*TESTS, "tests/nightly/ddptrain/test_gpu.py"),
        timeout_s=45,
        cpu=("tests/unit/ddptrain/test_fake_gpu.py",),
    ),
    Step(
        name="recipes",
        shows="an epoch of each recipe of ddptrain in bf16",
        command=check("recipes"),
        timeout_s=55,
    ),
    Step(
        name="ways",
        shows="fp32, fp16 with GradScaler, both memory formats, a loader with accumulation",
        command=check("ways"),
        timeout_s=35,
    ),
    Step(
        name="ends",
        shows="out of memory, an assert in a kernel, a kill in a kernel: cause named, memory free, no process left",
        command=check("ends"),
        timeout_s=50,
    ),
    Step(
        name="explain",
        shows="explain names a hang in a kernel, and one in a collective of NCCL",
        command=check("explains"),
        timeout_s=55,
    ),
    Step(
        name="losses",
        shows="a plain script and ResNet-18 under torchrun and ddprun: the same losses; seconds and memory of each",
        command=check("losses"),
        timeout_s=50,
    ),
    Step(
        name="resume",
        shows="ddptrain --deterministic continues after SIGKILL with the same weights, bit for bit",
        command=("bench/exact.py", "--groups=device", "--device={device}", "--json={json}"),
        timeout_s=55,
    ),
    Step(name="metrics", shows="ddprun's GPU metrics equal nvidia-smi's", command=check("metrics"), timeout_s=20),
    Step(name="doctor", shows="doctor's checks of the GPU, and bench", command=check("check_nodes"), timeout_s=35),
    Step(
        name="tutorials",
        shows="images/s beside the tutorials' loops",
        command=("bench/train.py", "--device={device}", "--rounds=2", "--json={json}", "--seconds=1"),
        timeout_s=45,
        cpu=("--rounds=1", "--seconds=0.1", "--models=ConvNet", "--ways=tutorial,ddptrain"),
    ),
    Step(
        name="checkpoint",
        shows="how long a checkpoint blocks the loop, beside torch.save",
        command=("bench/checkpoint.py", "--device={device}", "--rounds=5", "--json={json}"),
        timeout_s=20,
        cpu=("--rounds=1",),
    ),
    Step(
        name="startup",
        shows="seconds until the first step beside torchrun, and after a SIGKILL",
        command=("bench/startup.py", "--nodes=1", "--ranks=1", "--repeats=1", "--kills=2", "--device={device}"),
        timeout_s=30,
    ),
    Step(
        name="compile", shows="torch.compile, CUDA graphs", command=check("compiled"), timeout_s=120, part=2
    ),
    Step(name="sharded", shows="fully_shard in one rank", command=check("sharded"), timeout_s=60, part=2),
    Step(name="profile", shows="a profile has the GPU's kernels", command=check("profiled"), timeout_s=60, part=2),
    Step(
        name="forecast",
        shows="ddptrain fit beside the measured peak of memory, for six models",
        command=check("forecast"),
        timeout_s=60,
        part=2,
    ),
    Step(
        name="input",
        shows="microseconds to prepare an image, beside PIL",
        command=("bench/input.py", "--device={device}", "--rounds=3", "--json={json}"),
        timeout_s=60,
        part=2,
        cpu=("--rounds=1", "--seconds=0.1"),
    ),
    Step(
        name="grid",
        shows="an epoch of each recipe in fp32, bf16 and fp16",
        command=check("grid"),
        timeout_s=170,
        part=2,
    ),
    Step(
        name="speed_runs",
        shows="seconds of the recipes cifar10-94 and cifar10-96, and their accuracy with --data-dir",
        command=(*check("speed_runs"), "--data-dir={data}"),
        timeout_s=300,
        part=3,
    ),
)  # fmt: skip


def missing_packages() -> list[str]:
    """Return the packages that this Python lacks, except those that no step needs."""
    lacking = [package for module, package in MODULES.items() if importlib.util.find_spec(module) is None]
    return [package for package in lacking if package not in TOO_LARGE]


def download(folder: Path) -> int:
    """Collect the wheels of all packages, for the Python of a GPU machine. Return pip's exit code."""
    options = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3"]
    options += ["--abi=none", *(f"--platform={platform}" for platform in PLATFORMS), "--dest", str(folder)]
    packages = [package for package in MODULES.values() if package not in TOO_LARGE]
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, *packages], check=False)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len([*folder.glob('*.whl')])} wheels, {size / 1e6:.1f} MB, in {folder}")
    return done.returncode


def install(wheels: Path, folder: Path) -> str:
    """Install the packages that this Python lacks into ``folder``. Return what was installed, or end the program."""
    packages = missing_packages()
    if not packages:
        return "nothing"
    options = ["--no-index", "--find-links", str(wheels), "--target", str(folder), "--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        sys.exit(f"gpu.py: {', '.join(packages)} cannot be installed from {wheels}: {reason}: run make gpu-wheels")
    return ", ".join(packages)


def gpu_name(environ: Mapping[str, str]) -> str:
    """Return the name of the first GPU and torch's version, or "" if torch finds none."""
    code = "import torch; print(torch.cuda.get_device_name(0), 'torch', torch.__version__, 'CUDA', torch.version.cuda)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, env=environ, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def run(
    step: Step, device: str, out: Path, environ: Mapping[str, str], timeout_s: float, data: str
) -> dict[str, object]:
    """Run a step, end all its processes, and return its result."""
    log, numbers = out / f"{step.name}.log", out / f"{step.name}.json"
    numbers.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        arguments = step.arguments(device, numbers, data)
        process = measuring.start_python(
            arguments, cwd=ROOT, stdout=output, stderr=output, env=environ, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {
        "step": step.name,
        "state": "timed out" if code is None else "passed" if code == 0 else "failed",
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "timeout_s": timeout_s,
        "last_line": lines[-1] if lines else "",
        "numbers": json.loads(numbers.read_text()) if numbers.exists() else None,
    }


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """End a step's process. Kill the processes of its session that are left, so that the next step has the GPU."""
    if process.poll() is None:
        process.terminate()  # its ddprun ends its ranks
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == process.pid:
                os.kill(int(folder.name), signal.SIGKILL)
        except (OSError, ValueError, IndexError):  # the process has ended
            continue


def table(results: Sequence[Mapping[str, object]], head: str) -> str:
    """Return the results in Markdown."""
    shows = {step.name: step.shows for step in STEPS}
    lines = [head, "", "| step | shows | state | seconds | last line |", "|---|---|---|---|---|"]
    for result in results:
        last = str(result["last_line"])[:LINE_CHARS].replace("|", "/")
        lines.append(
            f"| {result['step']} | {shows[str(result['step'])]} | {result['state']} | {result['seconds']} | {last} |"
        )
    return "\n".join([*lines, ""])


def choose(part: int, only: Sequence[str]) -> list[Step]:
    """Return the steps of a part, or those with these names. End the program if a name is unknown."""
    if unknown := [name for name in only if name not in {step.name for step in STEPS}]:
        sys.exit(f"gpu.py: no step is named {', '.join(unknown)}: expected {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if (step.name in only if only else step.part == part)]


def environment(out: Path) -> dict[str, str]:
    """Return the environment of the steps: this checkout, and what was installed."""
    path = os.pathsep.join(map(str, (ROOT / "cli", ROOT / "trainer", ROOT, out / "site")))
    own = {"PYTHONPATH": path, "DDPCTL_STATE_DIR": str(out / "runs"), "PYTHONUNBUFFERED": "1"}
    return measuring.clean_environ("CUDA_LAUNCH", "NCCL_", "TORCH_NCCL") | own


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="names of steps of any part")
    parser.add_argument("--within", type=float, default=PART_S, help="seconds in all; later steps are left out")
    parser.add_argument("--cpu", action="store_true", help="run the CPU form of each step")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    parser.add_argument("--data-dir", type=Path, help="folder of CIFAR-10 for part 3")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--list", action="store_true", help="list the steps")
    parser.add_argument("--download", type=Path, metavar="DIR", help="collect the wheels")
    args = parser.parse_args()
    if args.list:
        for step in STEPS:
            print(f"{step.part}  {step.name:12}{step.timeout_s:4.0f} s  {step.shows}")
        return
    if args.download:
        args.download.mkdir(parents=True, exist_ok=True)
        sys.exit(download(args.download))
    sys.exit(run_steps(args))


def run_steps(args: argparse.Namespace) -> int:
    """Run the chosen steps, and write the results after each. Return the exit code."""
    began, out, device = time.monotonic(), args.out.resolve(), "cpu" if args.cpu else "cuda"
    steps, data = choose(args.part, args.only), str(args.data_dir.resolve()) if args.data_dir else ""
    factor = CPU_FACTOR if args.cpu else 1.0
    out.mkdir(parents=True, exist_ok=True)
    environ = environment(out)
    name = "CPU forms" if args.cpu else gpu_name(environ)
    if not name:
        print("gpu.py: torch finds no GPU here: run it on a machine with one, or give --cpu", file=sys.stderr)
        return NO_GPU
    installed = install(args.wheels, out / "site")
    results: list[dict[str, object]] = []
    head = f"Part {args.part}: {name}, installed: {installed}."
    for step in steps:
        left_s = factor * args.within - (time.monotonic() - began)
        if left_s < min(10.0, step.timeout_s):
            results.append({"step": step.name, "state": "left out", "code": None, "seconds": 0, "last_line": ""})
        else:
            print(f"{step.name}: {step.shows}", flush=True)
            results.append(run(step, device, out, environ, min(factor * step.timeout_s, left_s), data))
            print(f"  {results[-1]['state']} in {results[-1]['seconds']} s: {results[-1]['last_line']}", flush=True)
        measuring.write_json(out / "results.json", {"head": head, "results": results})
        (out / "results.md").write_text(table(results, head))
    failed = [str(result["step"]) for result in results if result["state"] != "passed"]
    seconds = time.monotonic() - began
    print(f"{len(results) - len(failed)} of {len(results)} passed in {seconds:.0f} s; {out / 'results.md'}")
    print(f"not passed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    main()
