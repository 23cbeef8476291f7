"""Causes that bench/explain.py injects from outside the ranks: in the links, disks and limits of two machines.

Each cause is a generator with up to three ``yield``. The code before the first one runs before the ranks start. The
code before the second one runs while they train. The code before the third one runs after ``ddpctl explain`` has
answered. The rest runs after the ranks have ended. ``SCRIPTS`` has, for each cause, the name of the function that the
ranks run. ``CASE_FILES`` has the file of each function.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lab import GROUPS, Machine, cgroup, machines

ROOT = Path(__file__).resolve().parents[2]
PORT = "61235"
MEMORY_BYTES = 2_500_000_000
NODE_CORES = 0.2  # half of what the two ranks of a node use in `computes_a_little`
LINK = "tbf rate 4mbit burst 32kb latency 400ms"
DISK_BYTES_PER_S = 4096


@dataclass(frozen=True, kw_only=True)
class Site:
    """Two machines, a folder, and the settings of the ranks of each node."""

    machines: tuple[Machine, ...]
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    enter: dict[int, Callable[[], object]] = field(default_factory=dict)  # called in a node's process before exec


Injection = Callable[[Site], Iterator[None]]
SCRIPTS: dict[str, str] = {}
CASE_FILES = {
    name: Path(__file__).with_name(file)
    for file, pattern in (
        ("cases.py", r"^@case\ndef (\w+)"),
        ("invented.py", r"^def ([a-z]\w+)"),
        ("healthy.py", r"^def (healthy_\w+)"),
    )
    for name in re.findall(pattern, Path(__file__).with_name(file).read_text(), re.MULTILINE)
}
INJECTIONS: dict[str, Injection] = {}


def injects(script: str) -> Callable[[Injection], Injection]:
    def register(inject: Injection) -> Injection:
        INJECTIONS[inject.__name__], SCRIPTS[inject.__name__] = inject, script
        return inject

    return register


def shell(machine: Machine, *commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", "netns", "exec", machine.namespace, *command.split()], check=True, timeout=10)


@injects("goes_on")
def ports_blocked(site: Site) -> Iterator[None]:
    """Drop new TCP connections on both nodes, except those to the port of the rendezvous."""
    for machine in site.machines:
        shell(machine, f"iptables -A INPUT -i eth0 -p tcp --syn ! --dport {PORT} -j DROP")
    yield
    yield


@injects("goes_on")
def link_is_down(site: Site) -> Iterator[None]:
    yield
    site.machines[1].cut()
    yield


@injects("goes_on")
def link_of_ranks_is_down(site: Site) -> Iterator[None]:
    """Break the connection between the ranks. The ddprun processes still reach each other."""
    yield
    for machine in site.machines:
        shell(machine, f"iptables -A INPUT -i eth0 -p tcp -m multiport ! --ports {PORT} -j DROP")
    yield


@injects("goes_on")
def link_is_half_open(site: Site) -> Iterator[None]:
    """Let packets pass from node 0 to the ranks of node 1, and drop the packets in the other direction."""
    yield
    shell(site.machines[0], f"iptables -A INPUT -i eth0 -p tcp -m multiport ! --ports {PORT} -j DROP")
    yield


@injects("sends_much")
def link_is_slow(site: Site) -> Iterator[None]:
    yield
    shell(site.machines[1], f"tc qdisc add dev eth0 root {LINK}")
    yield


@injects("eats_memory")
def memory_limit(site: Site) -> Iterator[None]:
    with cgroup("memory", {"memory.limit_in_bytes": str(MEMORY_BYTES)}) as site.enter[0]:
        yield
        yield
        yield


@injects("computes_a_little")
def node_at_half_speed(site: Site) -> Iterator[None]:
    with cgroup("cpu", {}) as site.enter[0], cgroup("cpu", {}) as site.enter[1]:  # with the same weight
        yield
        *_, own = sorted((GROUPS / "cpu").glob(f"bench-{os.getpid()}-*"))
        (own / "cpu.cfs_quota_us").write_text(str(int(NODE_CORES * 100_000)))
        yield
        yield


@injects("writes_to_disk")
def disk_does_not_write(site: Site) -> Iterator[None]:
    with disk(site) as folder:
        yield
        subprocess.run(["fsfreeze", "--freeze", folder], check=True, timeout=10)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", folder], check=True, timeout=10)
        yield


@injects("reads_from_disk")
def disk_reads_slowly(site: Site) -> Iterator[None]:
    limit = "blkio.throttle.read_bps_device"
    with disk(site) as folder, cgroup("blkio", {}) as site.enter[0]:
        device = folder.stat().st_dev
        (own,) = (GROUPS / "blkio").glob(f"bench-{os.getpid()}-*")
        (own / limit).write_text(f"{os.major(device)}:{os.minor(device)} {DISK_BYTES_PER_S}")
        try:
            yield
            yield
        finally:
            (own / limit).write_text(f"{os.major(device)}:{os.minor(device)} 0")
        yield


@injects("goes_on")
def healthy_nodes(site: Site) -> Iterator[None]:  # noqa: ARG001
    yield
    yield


@injects("sends_much")
def healthy_large_tensors(site: Site) -> Iterator[None]:  # noqa: ARG001
    yield
    yield


@injects("healthy_long_evaluation")
def healthy_evaluation_on_node_0(site: Site) -> Iterator[None]:  # noqa: ARG001
    yield
    yield


@contextlib.contextmanager
def disk(site: Site) -> Iterator[Path]:
    """Make a disk with a large file that is not in the page cache. The ranks get its folder in the variable DISK."""
    image, folder = site.folder / "disk.img", site.folder / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run = lambda *command: subprocess.run(command, check=True, timeout=30, capture_output=True)  # noqa: E731
    run("mkfs.ext4", "-q", image)
    for again in range(2):
        run("mount", "-o", "loop", image, folder)
        if not again:
            (folder / "large.bin").write_bytes(os.urandom(32 << 20))
            run("umount", folder)
    site.environ["DISK"] = str(folder)
    try:
        yield folder
    finally:
        run("umount", folder)


@contextlib.contextmanager
def launched(name: str, folder: Path) -> Iterator[Callable[[], None]]:
    """Start the ranks on two machines with the run folder ``folder``/run. Yield the function that injects the cause."""
    processes: list[subprocess.Popen[bytes]] = []
    folder.mkdir()
    with machines(2, prefix=f"x{[*INJECTIONS].index(name)}-") as made:
        site = Site(machines=made, folder=folder)
        inject = INJECTIONS[name](site)
        next(inject)
        try:
            environ = {"PYTHONPATH": f"{ROOT}/cli:{ROOT}/trainer:{ROOT}/bench", "OMP_NUM_THREADS": "1"} | site.environ
            options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "node-0", "--master-port", PORT]
            options += ["--max-restarts", "0", "--grace", "1", "--run-dir", str(folder / "run")]
            for node, machine in enumerate(made):
                command = ["-P", "-m", "ddprun", *options, "--node-rank", str(node)]
                with (folder / f"output-{node}").open("wb") as output:
                    processes.append(
                        machine.start(
                            *command,
                            str(CASE_FILES[SCRIPTS[name]]),
                            SCRIPTS[name],
                            env=os.environ | environ,
                            stdout=output,
                            stderr=output,
                            preexec_fn=site.enter.get(node),
                        )
                    )
            yield lambda: next(inject)
        finally:
            next(inject, None)
            for machine in made:
                machine.kill()
            for process in processes:
                process.wait(20)
            inject.close()
