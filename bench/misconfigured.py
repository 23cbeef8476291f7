"""What ddprun says, and how soon, when a job of two machines is set up wrongly; with --torchrun, what torchrun says.

    python bench/misconfigured.py [--torchrun] [--write] [TITLE ...]

prints a table; --write puts it into docs/troubleshooting.md. Needs root on Linux: the machines are network namespaces.
"""

import argparse
import concurrent.futures
import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lab
import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- made by bench/misconfigured.py --write -->\n", "<!-- end -->\n"
PORT = "61234"
BOUND_S = 90.0
SKEWED = "import time; time.time = lambda real=time.time: real() + 60"
OLDER = "import torch; torch.__version__ = '2.10.0'"
SCRIPT = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"

Machines = tuple[lab.Machine, ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as somebody starts it."""

    machine: int
    rank: int
    nnodes: int = 2
    nproc: int = 1
    image: str = ""
    startup: str = ""  # Python that runs before all else: a clock, or a build, that only pretends
    script: str = SCRIPT


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to get it wrong. The last node is started last, and the ``speaker`` is the one that is asked."""

    title: str
    nodes: tuple[Node, ...]
    speaker: int
    master: str = "node-0"
    prepare: Callable[[Machines], list[list[str]]] = lambda _: []  # changes the machines; commands that run meanwhile


BOTH = (Node(machine=0, rank=0), Node(machine=1, rank=1))
SECOND = BOTH[1:]


def debian(machines: Machines) -> list[list[str]]:
    machines[0].write_hosts("127.0.1.1 node-0\n10.77.0.11 node-1\n")
    return []


def debian_everywhere(machines: Machines) -> list[list[str]]:
    for machine in machines:
        machine.write_hosts(f"127.0.1.1 {machine.name}\n")
    return []


def somebody_listens(machines: Machines) -> list[list[str]]:
    return [machines[0].command(sys.executable, "-m", "http.server", PORT)]


def drop_answers(machines: Machines) -> list[list[str]]:
    machines[0].ip("route", "add", "blackhole", f"{machines[1].address}/32")
    return []


CASES = (
    Case(title="the master's name does not exist", nodes=BOTH, speaker=1, master="nosuch.invalid"),
    Case(title="Debian's `127.0.1.1 node-0` in node 0's /etc/hosts", nodes=BOTH, speaker=0, prepare=debian),
    Case(
        title="Debian's line on every node, the master by its address",
        nodes=BOTH,
        speaker=0,
        master="10.77.0.10",
        prepare=debian_everywhere,
    ),
    Case(title="the master's address is not node 0's", nodes=BOTH, speaker=0, master="10.77.0.99"),
    Case(title="the master is 127.0.0.1 on two machines", nodes=BOTH, speaker=1, master="127.0.0.1"),
    Case(title="the port is taken on node 0", nodes=BOTH, speaker=0, prepare=somebody_listens),
    Case(title="node 0 was not started", nodes=SECOND, speaker=0),
    Case(title="node 1 was not started", nodes=BOTH[:1], speaker=0),
    Case(title="a firewall drops what goes to node 0", nodes=BOTH, speaker=1, prepare=drop_answers),
    Case(title="node 0's machine is down", nodes=SECOND, speaker=0, master="10.77.0.99"),
    Case(title="no route leads to node 0's network", nodes=SECOND, speaker=0, master="10.99.0.1"),
    Case(title="something else listens on node 0's port", nodes=SECOND, speaker=0, prepare=somebody_listens),
    Case(
        title="two machines with the same node rank",
        nodes=(Node(machine=0, rank=0, nnodes=3), *2 * (Node(machine=1, rank=1, nnodes=3),)),
        speaker=2,
    ),
    Case(
        title="the nodes count differently",
        nodes=(Node(machine=0, rank=0, nnodes=2), Node(machine=1, rank=1, nnodes=3)),
        speaker=1,
    ),
    Case(
        title="other numbers of ranks on each node",
        nodes=(BOTH[0], Node(machine=1, rank=1, nproc=2)),
        speaker=0,
    ),
    Case(title="another torch (pretended)", nodes=(BOTH[0], Node(machine=1, rank=1, startup=OLDER)), speaker=0),
    Case(
        title="another image",
        nodes=(Node(machine=0, rank=0, image="train:2@sha256:a1"), Node(machine=1, rank=1, image="train:1@sha256:b2")),
        speaker=0,
    ),
    Case(title="another script", nodes=(BOTH[0], Node(machine=1, rank=1, script=f"{SCRIPT}  # edited")), speaker=0),
    Case(title="a clock 60 s ahead", nodes=(BOTH[0], Node(machine=1, rank=1, startup=SKEWED)), speaker=1),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    said: str
    seconds: float
    code: int | None  # None: it was still waiting


def run(case: Case, launcher: str, prefix: str) -> Result:
    """What the speaker said, and how long after the last node's start it ended."""
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
            command, env = started_as(case, node, launcher, Path(folder) / str(place))
            output = Path(folder) / f"{place}.err"
            processes.append(stack.enter_context(started(machines[node.machine].command(*command), output, env)))
            began = time.monotonic()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = processes[case.speaker].wait(BOUND_S)
        seconds = time.monotonic() - began
        lines = (Path(folder) / f"{case.speaker}.err").read_text(errors="replace").splitlines()
        return Result(said=sentence(lines, folder), seconds=seconds, code=code)


def started_as(case: Case, node: Node, launcher: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a node that is launched by ``launcher``."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(node.startup)
    script = folder / "train.py"
    script.write_text(node.script)
    place = ["--nnodes", node.nnodes, "--nproc-per-node", node.nproc, "--node-rank", node.rank]
    place += ["--master-addr", case.master, "--master-port", PORT]
    if launcher == "ddprun":
        place += ["--join-timeout", 2]
    path = [str(folder), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(folder), "DDP_IMAGE": node.image, "DDP_DEVICE": "cpu"}
    module = "ddprun" if launcher == "ddprun" else "torch.distributed.run"
    return [sys.executable, "-m", module, *map(str, place), str(script)], os.environ | env


@contextlib.contextmanager
def started(command: list[str], output: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards; what else lives on its machine goes with the machine."""
    with output.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def sentence(lines: list[str], folder: str) -> str:
    """The line that a person would quote."""
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
    line = re.sub(r" \(exit code .*\)$|^\[node\d\] ", "", line)
    return line.replace("|", "/")


def import_torch_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
    return time.monotonic() - began


def row(case: Case, ours: Result, theirs: Result | None) -> str:
    def cell(result: Result) -> str:
        how = "still waiting" if result.code is None else f"exit code {result.code}"
        return f"{how} after {result.seconds:.1f} s, and said: {result.said}"

    cells = [case.title, ours.said, f"{ours.seconds:.1f}", str(ours.code), *([cell(theirs)] if theirs else ["not run"])]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchrun", action="store_true", help=f"beside it, bounded at {BOUND_S:g} s each")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("titles", nargs="*")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.titles or case.title in args.titles]
    alone_s = [import_torch_s()]
    ours = [run(case, "ddprun", "ours") for case in cases]
    alone_s.append(import_torch_s())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # torchrun mostly waits
        futures = (
            [pool.submit(run, case, "torchrun", f"t{i}-") for i, case in enumerate(cases)] if args.torchrun else []
        )
        theirs = [future.result() for future in futures] or [None] * len(cases)
    what = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, one run each"
    text = (
        f"Measured with {what}, --join-timeout 2; torchrun was given up after {BOUND_S:g} s. The seconds count from "
        f"the start of the last node's process; Python's own start and the import of torch are in them, which alone "
        f"took {min(alone_s):.1f} to {max(alone_s):.1f} s on this machine meanwhile.\n\n"
    )
    text += "| what is wrong | ddprun says | after s | exit code | torchrun |\n|---|---|---|---|---|\n"
    text += "".join(row(case, one, other) for case, one, other in zip(cases, ours, theirs, strict=True))
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    slow = [f"{case.title}: {one.seconds:.1f} s" for case, one in zip(cases, ours, strict=True) if one.code is None]
    sys.exit("\n".join(slow) or 0)


if __name__ == "__main__":
    main()
