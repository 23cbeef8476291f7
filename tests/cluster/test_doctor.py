"""ddpctl doctor on four SSH machines out of namespaces: sound ones, then each with faults planted. Needs root."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.lab import Machine, ip, machines
from tests.cluster.ssh_cluster import Lab
from tests.cluster.ssh_lab import PACKAGES, ROOT_MISSING, Person, box

pytestmark = pytest.mark.skipif(ROOT_MISSING is not None, reason=str(ROOT_MISSING))
PORT = 29531
TIMEOUT_S = 300
C10 = Path(torch.__file__).parent / "lib" / "libc10.so"
# A stand-in for a wrong clock: the kernel has one of the wall for all namespaces.
WRONG_CLOCK = "import time\n_now = time.time\ntime.time = lambda: _now() + 60\n"
ONE_PORT_OPEN = f"""\
iptables -P INPUT DROP
iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT
iptables -A INPUT -p tcp -m multiport --dports 22,{PORT} -j ACCEPT
"""
# ip netns hides the groups of the CPU, which a machine of its own sees.
SEE_GROUPS = (
    "if grep -q ^cpu /proc/cgroups && ! [ -e /sys/fs/cgroup/cgroup.procs ]; then "
    "mkdir -p /sys/fs/cgroup/cpu && mount -t cgroup -o cpu cgroup /sys/fs/cgroup/cpu; fi"
)


@dataclass(frozen=True, kw_only=True)
class Faulty(Machine):
    """A machine on which a script runs before each command, in the command's own mount namespace."""

    before: str

    def command(self, *argv: str) -> list[str]:
        return super().command("sh", "-c", f'set -e\n{self.before}\nexec "$@"', "sh", *argv)


@contextlib.contextmanager
def lab(folder: Path, before: tuple[str, ...], environ: tuple[dict[str, str], ...]) -> Iterator[Lab]:
    """A laptop and a machine for each of ``before``."""
    person = Person(folder / "me")
    with machines(1 + len(before), prefix="doctor") as made, contextlib.ExitStack() as stack:
        laptop, *rest = made
        faulty = [Faulty(**vars(one), before=script) for one, script in zip(rest, before, strict=True)]
        boxes = [
            stack.enter_context(
                box(
                    folder / one.name,
                    person,
                    address=one.address,
                    machine=one,
                    environ={"PATH": os.environ["PATH"], **own},
                )
            )
            for one, own in zip(faulty, environ, strict=True)
        ]
        variables = {"HOME": str(person.home), "PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES}
        cluster = Lab(
            folder=folder, laptop=laptop, machines=tuple(rest), boxes=tuple(boxes), person=person, variables=variables
        )
        yield cluster


@contextlib.contextmanager
def quota(pid: int, share: float) -> Iterator[None]:
    """A cgroup for a process, and what it starts, with so much of one core."""
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
        for one in (group / "cgroup.procs").read_text().split():
            (first / "cgroup.procs").write_text(one)
        deadline = time.monotonic() + 30
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # processes that end
                assert time.monotonic() < deadline
                time.sleep(0.1)


def examine(cluster: Lab) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], dict[tuple[int, str], Any]]:
    """The doctor's process, its JSON, and its findings by node and check."""
    done = cluster.ddpctl("doctor", "--json", timeout=TIMEOUT_S)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    return done, result, {(one["node"], one["check"]): one for one in result["results"]}


def write(cluster: Lab, options: str = "", nodes: int = 4) -> None:
    cluster.write(options=options)
    path = cluster.folder / "ddpctl.yaml"
    path.write_text(path.read_text().replace("nodes: 2, gpus: 2", f"nodes: {nodes}, gpus: 1, port: {PORT}"))


def test_each_fault_is_named_with_its_node_and_nothing_sound_is_accused(tmp_path: Path) -> None:
    checkpoints, stale, wrong = tmp_path / "checkpoints", tmp_path / "libc10.so", tmp_path / "wrong-clock"
    checkpoints.mkdir()
    wrong.mkdir()
    (wrong / "sitecustomize.py").write_text(WRONG_CLOCK)
    stale.write_bytes(C10.read_bytes() + b"\0")
    full = f"mount -t tmpfs -o size=1m tmpfs {checkpoints}; head -c 2m /dev/zero >{checkpoints}/filler 2>&- || true"
    before = (
        ONE_PORT_OPEN,
        f"ulimit -n 256\n{SEE_GROUPS}",
        "",
        f"mount --bind {stale} {C10}\nmount -t tmpfs -o size=1m tmpfs /dev/shm\n{full}",
    )
    environ = ({}, {}, {"PYTHONPATH": f"{wrong}:{PACKAGES}"}, {})
    with lab(tmp_path, before, environ) as cluster, quota(cluster.boxes[1].process.pid, 0.2):
        link = cluster.machines[2]
        ip("-n", link.switch, "link", "set", link.port, "mtu", "1400")
        names = "".join(f"{one.address} {one.name}\n" for one in cluster.machines[1:])
        link.write_hosts(f"127.0.0.1 {cluster.machines[0].name}\n{names}")
        write(cluster, options=f"    checkpoint_dir: {checkpoints}\n")
        done, result, found = examine(cluster)
    bad = {place for place, one in found.items() if one["status"] == "bad"}
    print(done.stderr, json.dumps([one for one in result["results"] if one["status"] in ("bad", "warning")], indent=1))
    assert done.returncode == 69
    planted = {
        (0, "ports"),
        (1, "open files"),
        (2, "path MTU"),
        (2, "names"),
        (2, "clock"),
        (3, "/dev/shm"),
        (3, "libraries"),
        (3, "disk"),
    }
    assert bad - {(1, "CPU")} == planted
    loaded = all(found[node, "CPU"]["status"] == "warning" for node in range(4))  # then the quota may not be reached
    assert found[1, "CPU"]["status"] == "bad" or loaded
    assert "cannot connect" in found[0, "ports"]["value"]
    assert "1400" in found[2, "path MTU"]["value"]
    assert len(result["findings"]) == len(bad)
    assert {one["node"] for one in result["nodes"]} == {0, 1, 2, 3}
    assert not list((tmp_path / "runs").glob("doctor-*"))


def test_a_launch_leaves_a_bad_machine_out_and_goes_on_with_sound_ones(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('trained by', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    with lab(tmp_path, ("", "mount -t tmpfs -o size=1m tmpfs /dev/shm", ""), ({},) * 3) as cluster:
        write(cluster, nodes=2)
        done = cluster.ddpctl("launch", "--doctor", "--", str(script), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert f"{cluster.boxes[1].address} left out; the doctor looks at the others" in done.stderr
    assert "trained by 1 of 2" in done.stdout
    assert done.stderr.count("path MTU") == 2  # two tables; the second has nothing bad
    assert done.stderr.rindex("BAD") < done.stderr.index("left out")
