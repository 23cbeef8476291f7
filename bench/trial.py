"""Start a job with one mistake. Record what the launcher reports, and how long it takes to end."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lab
from mistakes import PORT, Case, Node

ROOT = Path(__file__).parent.parent
BOUND_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Result:
    said: str
    seconds: float
    code: int | None  # None: it was still waiting


def run(case: Case, launcher: str, prefix: str) -> Result:
    """Start a job with a mistake. Wait until the launcher of the node ``case.speaker`` ends, at most BOUND_S seconds.

    Return the launcher's message, its exit code, and the seconds from the start of the last node to the launcher's end.
    """
    with (
        lab.machines(2, prefix=prefix) as machines,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        for command in case.prepare(machines):
            stack.enter_context(started(command, Path(folder) / "other"))
            time.sleep(2)
        processes = []
        for place, node in enumerate(case.nodes):
            arguments, env = started_as(case, node, launcher, Path(folder) / str(place))
            output = stack.enter_context((Path(folder) / f"{place}.err").open("wb"))
            process = machines[node.machine].start(*arguments, stdout=output, stderr=output, env=env)
            processes.append(stack.enter_context(killed(process)))
            began = time.monotonic()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = processes[case.speaker].wait(BOUND_S)
        seconds = time.monotonic() - began
        lines = (Path(folder) / f"{case.speaker}.err").read_text(errors="replace").splitlines()
        message = sentence(lines, folder)
        if launcher == "ddprun" and code == 0 and not message.startswith("warning: "):
            message = "no error: ddprun gives the ranks the right interface, and they train"
        return Result(said=message, seconds=seconds, code=code)


def started_as(case: Case, node: Node, launcher: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return Python's arguments and environment for a node that is launched by ``launcher``."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(node.script)
    place = ["--nnodes", node.nnodes, "--node-rank", node.rank]
    place += ["--master-addr", case.master, "--master-port", PORT]
    if launcher == "ddprun":
        place += ["--join-timeout", case.join_timeout_s]
    path = [str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]
    if node.startup:
        (folder / "sitecustomize.py").write_text(node.startup)
        path.insert(0, str(folder))
    env = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(folder), "DDP_IMAGE": node.image, "DDP_DEVICE": "cpu"}
    module = "ddprun" if launcher == "ddprun" else "torch.distributed.run"
    return ["-m", module, *map(str, place), str(script), *node.arguments], os.environ | env


@contextlib.contextmanager
def started(command: list[str], output: Path) -> Iterator[None]:
    """Run a command while the block runs."""
    with output.open("wb") as file, killed(subprocess.Popen(command, stdout=file, stderr=file)):
        yield


@contextlib.contextmanager
def killed(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a process after the block. The children of the process end later, when the machine is removed."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def sentence(lines: list[str], folder: str) -> str:
    """Return the line that says what is wrong."""
    own = [line for line in lines if re.match(r"\[node\d+\] ", line)]
    warnings = [line for line in own if "warning: " in line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    logged = [
        line.partition("[c10d] ")[2] for line in lines if "[c10d] " in line and "hostname of the client" not in line
    ]
    line = (
        (warnings or own or errors or logged or ["nothing"])[-1]
        .replace(folder, "...")
        .replace(sys.executable, "python")
    )
    line = re.sub(r" \((exit code|the run.s exit code) .*\)$|^\[node\d\] ", "", line)
    return line.replace("|", "/")
