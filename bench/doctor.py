"""Check that ``ddpctl doctor`` reports each fault on its node, and does not report a healthy node or link as bad.

    python bench/doctor.py [--sound 20] [--busy 2] [FAULT ...]

The target is four SSH machines made of network namespaces. The faults are injected one at a time. After each fault,
``ddpctl doctor`` checks the target (``ddpctl bench`` for the slow link). Then a healthy target is checked --sound times
while busy loops run. The exit code is 1 if a fault is not reported on its node, or if a healthy node or link is
reported as bad. Needs root, iproute2 and iptables.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring
import torch

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "cli"), str(ROOT / "trainer")]

from bench.lab import Machine, ip, machines  # noqa: E402
from tests.cluster.ssh_cluster import Lab  # noqa: E402
from tests.cluster.ssh_lab import PACKAGES, Person, box  # noqa: E402

from ddpwire.machine import SHM_DIR  # noqa: E402

NODES = 4
PORT = 29531
TIMEOUT_S = 400
C10 = Path(torch.__file__).parent / "lib" / "libc10.so"
# A stand-in for a wrong clock: the kernel has one of the wall for all namespaces.
WRONG_CLOCK = "import time\n_now = time.time\ntime.time = lambda: _now() + 60\n"
ONE_PORT_OPEN = f"""\
iptables -P INPUT DROP
iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT
iptables -A INPUT -p tcp -m multiport --dports 22,{PORT} -j ACCEPT
"""
SMALL_SHM = f"mount -t tmpfs -o size=1m tmpfs {SHM_DIR}\n"
# ip netns hides the groups of the CPU, which a machine of its own sees.
SEE_GROUPS = (
    "if grep -q ^cpu /proc/cgroups && ! [ -e /sys/fs/cgroup/cgroup.procs ]; then "
    "mkdir -p /sys/fs/cgroup/cpu && mount -t cgroup -o cpu cgroup /sys/fs/cgroup/cpu; fi\n"
)
SLOW_LINK = (
    "qdisc add dev eth0 root handle 1: htb default 1",
    *(f"class add dev eth0 parent 1: classid 1:{number} htb rate 10gbit quantum 60000" for number in (1, 2)),
    "qdisc add dev eth0 parent 1:2 tbf rate 40mbit burst 32kb latency 200ms",
)
Place = tuple[int, str]  # a node and a check


def full(folder: Path) -> str:
    """Return a script that mounts a full disk at ``folder``."""
    return f"mount -t tmpfs -o size=1m tmpfs {folder}; head -c 2m /dev/zero >{folder}/filler 2>&- || true\n"


def stale_library(folder: Path) -> str:
    """Return a script that replaces a library of torch with a copy that has one more byte."""
    (folder / "libc10.so").write_bytes(C10.read_bytes() + b"\0")
    return f"mount --bind {folder}/libc10.so {C10}\n"


def wrong_clock(folder: Path) -> dict[str, str]:
    """Return environment variables for a node, with which Python's clock is one minute ahead."""
    (folder / "wrong-clock").mkdir()
    (folder / "wrong-clock" / "sitecustomize.py").write_text(WRONG_CLOCK)
    return {"PYTHONPATH": f"{folder}/wrong-clock:{PACKAGES}"}


@dataclass(frozen=True, kw_only=True)
class Faulty(Machine):
    """A machine on which a script runs before each command, in the command's own mount namespace."""

    before: str

    def command(self, *argv: str) -> list[str]:
        return super().command("sh", "-c", f'set -e\n{self.before}\nexec "$@"', "sh", *argv)


@contextlib.contextmanager
def lab(folder: Path, before: tuple[str, ...], environ: tuple[dict[str, str], ...] = ()) -> Iterator[Lab]:
    """Yield a lab with a laptop and one machine for each script in ``before``."""
    person = Person(folder / "me")
    with machines(1 + len(before), prefix="doctor") as made, contextlib.ExitStack() as stack:
        laptop, *rest = made
        faulty = [Faulty(**vars(machine), before=script) for machine, script in zip(rest, before, strict=True)]
        boxes = [
            stack.enter_context(
                box(
                    folder / machine.name,
                    person,
                    address=machine.address,
                    machine=machine,
                    environ={"PATH": os.environ["PATH"], **own},
                )
            )
            for machine, own in zip(faulty, environ or ({},) * len(faulty), strict=True)
        ]
        variables = {"HOME": str(person.home), "PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES}
        yield Lab(
            folder=folder, laptop=laptop, machines=tuple(rest), boxes=tuple(boxes), person=person, variables=variables
        )


def write(cluster: Lab, options: str = "", nodes: int = NODES) -> None:
    """Write a ddpctl.yaml for ``nodes`` nodes with one rank each."""
    cluster.write(options=options)
    path = cluster.folder / "ddpctl.yaml"
    path.write_text(path.read_text().replace("nodes: 2, gpus: 2", f"nodes: {nodes}, gpus: 1, port: {PORT}"))


@contextlib.contextmanager
def quota(pid: int, share: float) -> Iterator[None]:
    """Limit a process and its children to this share of one core, with a cgroup."""
    root = Path("/sys/fs/cgroup")
    first = root / "cpu" if (root / "cpu").is_dir() else root
    group = first / f"ddpctl-doctor-{os.getpid()}"
    group.mkdir()
    try:
        if first == root:
            (group / "cpu.max").write_text(f"{int(share * 100_000)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (first / "cgroup.procs").write_text(member)
        deadline = time.monotonic() + 30
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # processes that end
                assert time.monotonic() < deadline
                time.sleep(0.1)


def small_mtu(cluster: Lab, node: int) -> None:
    """Set the MTU to 1400 on the switch's side of a node's link. The node's own side keeps 1500."""
    machine = cluster.machines[node]
    ip("-n", machine.switch, "link", "set", machine.port, "mtu", "1400")


def loopback_name(cluster: Lab, node: int) -> None:
    """Make the name of the first machine resolve to a loopback address on ``node``."""
    names = "".join(f"{machine.address} {machine.name}\n" for machine in cluster.machines[1:])
    cluster.machines[node].write_hosts(f"127.0.0.1 {cluster.machines[0].name}\n{names}")


def slow_link(cluster: Lab, a: int, b: int) -> None:
    """Limit the link from node ``a`` to node ``b`` to 40 Mbit/s."""
    to_b = f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {cluster.machines[b].address}/32 flowid 1:2"
    for line in (*SLOW_LINK, to_b):
        argv = ["ip", "netns", "exec", cluster.machines[a].namespace, "tc", *line.split()]
        subprocess.run(argv, check=True, timeout=10, capture_output=True)


def examine(cluster: Lab, *arguments: str) -> dict[str, Any]:
    """Run a ``ddpctl`` command and return the JSON that it prints, which must contain its exit code."""
    done = cluster.ddpctl(*(arguments or ("doctor",)), "--json", timeout=TIMEOUT_S)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == result["code"], (done.returncode, done.stderr)
    return result


def bad_places(result: dict[str, Any]) -> set[Place]:
    """Return each bad check with its node. For ``ddpctl bench``, return the slow nodes and the slow links.

    A link is listed under its first node."""
    if result["check"] == "bench":
        return {(members[0], "slow " + "-".join(map(str, members))) for members in result["slow"]}
    return {(finding["node"], finding["check"]) for finding in result["results"] if finding["status"] == "bad"}


def no_effect(_: Lab) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the place where it must be found."""

    title: str
    place: Place
    before: Callable[[Path], str] = lambda _: ""
    environ: Callable[[Path], dict[str, str]] = lambda _: {}
    after: Callable[[Lab], Any] = lambda _: None
    within: Callable[[Lab], AbstractContextManager[None]] = field(default=no_effect)
    arguments: tuple[str, ...] = ("doctor",)
    options: str = ""


CHECKPOINTS = "    checkpoint_dir: {folder}/checkpoints\n"
FAULTS = (
    Fault(
        title="slow link",
        place=(1, "slow 1-3"),
        after=lambda cluster: slow_link(cluster, 1, 3),
        arguments=("bench", "--sizes", "64K"),
    ),
    Fault(
        title="slow node",
        place=(1, "CPU"),
        before=lambda _: SEE_GROUPS,
        within=lambda cluster: quota(cluster.boxes[1].process.pid, 0.2),
    ),
    Fault(title="MTU 1400", place=(2, "path MTU"), after=lambda cluster: small_mtu(cluster, 2)),
    Fault(title="firewall", place=(0, "ports"), before=lambda _: ONE_PORT_OPEN),
    Fault(title="clock 60 s off", place=(2, "clock"), environ=wrong_clock),
    Fault(title="name on the loopback", place=(2, "names"), after=lambda cluster: loopback_name(cluster, 2)),
    Fault(title=f"{SHM_DIR} of 1 MB", place=(3, SHM_DIR), before=lambda _: SMALL_SHM),
    Fault(title="stale library", place=(3, "libraries"), before=stale_library),
    Fault(
        title="full disk",
        place=(3, "disk"),
        before=lambda folder: full(folder / "checkpoints"),
        options=CHECKPOINTS,
    ),
    Fault(title="nofile 256", place=(1, "open files"), before=lambda _: "ulimit -n 256\n"),
    Fault(
        title="full disk of the runs",
        place=(3, "disk"),
        before=lambda folder: full(folder / "node-4" / "home"),
    ),
    Fault(title="no answer", place=(1, "SSH"), after=lambda cluster: cluster.boxes[1].kill()),
)


def run(fault: Fault, folder: Path) -> dict[str, Any]:
    """Inject one fault, run the check and return its result."""
    node = fault.place[0]
    (folder / "checkpoints").mkdir()
    before, environ = [""] * NODES, [dict[str, str]() for _ in range(NODES)]
    before[node], environ[node] = fault.before(folder), fault.environ(folder)
    with lab(folder, tuple(before), tuple(environ)) as cluster, fault.within(cluster):
        fault.after(cluster)
        write(cluster, options=fault.options.format(folder=folder))
        return examine(cluster, *fault.arguments)


def show(title: str, reported: set[Place], expected: set[Place], began: float) -> bool:
    """Print a row of the table. Return whether exactly the expected places were reported."""

    def text(places: set[Place]) -> str:
        return ", ".join(f"node {node}: {check}" for node, check in sorted(places)) or "-"

    load = os.getloadavg()[0]
    row = f"{title:<24}{text(reported & expected):<24}{text(reported - expected):<24}"
    print(f"{row}{time.monotonic() - began:5.0f} s{load:7.1f}", flush=True)
    return reported == expected


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--sound", type=int, default=20, metavar="N", help="examine a sound target so many times")
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, metavar="N", help="busy loops meanwhile")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="titles of faults [default: all]")
    args = parser.parse_args()
    right = True
    print(f"{'FAULT':<24}{'NAMED':<24}{'FALSELY ACCUSED':<24}{'TIME':>7}{'LOAD':>7}")
    for fault in (each for each in FAULTS if not args.faults or each.title in args.faults):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            right &= show(fault.title, bad_places(run(fault, Path(folder))), {fault.place}, began)
    if args.sound:
        with tempfile.TemporaryDirectory() as folder, lab(Path(folder), ("",) * NODES) as cluster:
            write(cluster)
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
            try:
                for number in range(args.sound):
                    began = time.monotonic()
                    right &= show(f"none, {args.busy} loops, {number + 1}", bad_places(examine(cluster)), set(), began)
            finally:
                for loop in loops:
                    loop.kill()
                    loop.wait()
    sys.exit(not right)


if __name__ == "__main__":
    main()
