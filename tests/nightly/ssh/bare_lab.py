"""Fresh Debian machines out of namespaces: each has a root filesystem, processes, hostname and address of its own,
and an sshd that lets a person in as root. Needs root, mmdebstrap and an overlay filesystem.

A machine is what a container is: its PID 1 is a shell, services are those of /etc/init.d, the kernel is this one. It
has no way out: the packages that it may install lie in its apt cache. DDPCTL_TEST_BARE_ROOT names a folder in which
the root filesystem is kept for the next time.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab import Machine, machines
from tests.cluster.ssh_lab import KEYGEN, PACKAGES, SSHD, Person, make_key
from tests.e2e.driver import ROOT, wait_until

PROGRAMS = ("mmdebstrap", "unshare", "ip")
INSTALLED = "openssh-server,python3,python3-apt,sudo,iproute2,procps,ca-certificates"
# What the roles install. podman and NFS are looked at with --check alone.
IN_THE_CACHE = (
    "docker.io chrony nftables prometheus-node-exporter prometheus munge slurmctld slurmd slurm-client nfs-common "
    "nfs-kernel-server podman"
)
BUILD_S = 600

# As PID 1 of its namespace. /shared is a folder that all machines see, as NFS would give it.
BOOT = """\
set -eu
root=$1 base=$2 upper=$3 shared=$4
shift 4
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$base,upperdir=$upper/files,workdir=$upper/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/sshd" "$root/run/lock"
mount -t devpts -o newinstance,ptmxmode=0666,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for node in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${node%:*}" c 1 "${node#*:}"
done
mknod -m 666 "$root/dev/tty" c 5 0
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mkdir -p "$root/shared" "$root/var/lib/docker" "$upper/docker"
mount --bind "$shared" "$root/shared"
mount --bind "$upper/docker" "$root/var/lib/docker"
for path in "$@"; do # this checkout and its Python, to be read
  mkdir -p "$root$path"
  mount --bind -o ro "$path" "$root$path"
done
cat /etc/hosts >"$root/etc/hosts"
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /bin/bash -c '
chmod 755 /root
/usr/sbin/sshd -E /var/log/sshd.log
touch /run/booted
while :; do sleep 1 & wait; done'
"""


def missing() -> str:
    """Why there can be no such machines here; empty where there can."""
    if sys.platform != "linux" or os.getuid():
        return "needs root on Linux (namespaces)"
    absent = [name for name in PROGRAMS if not shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")]
    if absent or not (SSHD and KEYGEN):
        return f"needs {', '.join(absent) or 'sshd'} (apt install mmdebstrap iproute2 openssh-server)"
    return ""


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A machine that is up."""

    machine: Machine
    root: Path  # what it has as /, to be seen from its own mount namespace alone
    files: Path  # what differs from a fresh one
    pid: int  # of its PID 1, here

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def address(self) -> str:
        return self.machine.address

    def sh(self, script: str, *args: str, check: bool = True, timeout_s: float = 120) -> str:
        """What a script says there, as root."""
        spaces = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--uts", "--ipc"]
        argv = [*spaces, "chroot", f"/proc/{self.pid}/root", "/bin/sh", "-c", script, "sh", *args]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr


def base() -> Path:
    """The root filesystem of a fresh machine, made once."""
    kept = os.environ.get("DDPCTL_TEST_BARE_ROOT")
    folder = Path(kept or tempfile.mkdtemp(prefix="ddpctl-test-bare-"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "root").exists():
            _make(folder / "root.new")
            (folder / "root.new").rename(folder / "root")
    return folder / "root"


def _make(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    fetch = "apt-get install --yes --download-only --no-install-recommends -o APT::Keep-Downloaded-Packages=true"
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={INSTALLED}", "--skip=cleanup/apt"]
    argv += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")]
    argv += ["--dpkgopt=force-unsafe-io", f'--customize-hook=chroot "$1" {fetch} {IN_THE_CACHE}']
    env = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run([*argv, "bookworm", str(root)], env=env, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr[-3000:]


@contextlib.contextmanager
def bare(
    machine: Machine, folder: Path, person: Person, fresh: Path, shared: Path, *, disk: str | None = None
) -> Iterator[Bare]:
    """A fresh machine, in which the person is root by key; ``disk``: how large its own is, such as 16m."""
    root, upper = folder / "root", folder / "upper"
    if disk:
        upper.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk}", "tmpfs", upper], check=True, timeout=30)
    ssh = upper / "files" / "etc" / "ssh"
    for path in (root, upper / "files" / "root" / ".ssh", ssh / "sshd_config.d", upper / "work"):
        path.mkdir(parents=True)
    host_key = make_key(ssh / "ssh_host_ed25519_key")
    (upper / "files" / "root" / ".ssh" / "authorized_keys").write_text(person.public_key + "\n")
    (ssh / "sshd_config.d" / "lab.conf").write_text(f"SetEnv PYTHONPATH={PACKAGES}\nUseDNS no\nPrintLastLog no\n")
    # This root may not raise limits, as Docker's init script wants to: there the word does nothing.
    (upper / "files" / "etc" / "default").mkdir()
    (upper / "files" / "etc" / "default" / "docker").write_text("ulimit() { :; }\n")
    upper.joinpath("files").chmod(0o755)
    person.trusts(machine.address, host_key)
    seen = _only_outermost([str(ROOT), sys.prefix, sys.base_prefix])
    spaces = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
    argv = machine.command(*spaces, "sh", "-c", BOOT, "boot", *map(str, (root, fresh, upper, shared)), *seen)
    with (folder / "boot.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=_path(), start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or _pid_one(process.pid), "the machine's sshd", timeout_s=60)
        assert process.poll() is None, (folder / "boot.log").read_text()
        pid = _pid_one(process.pid)
        yield Bare(machine=machine, root=root, files=upper / "files", pid=pid)
    finally:
        process.kill()
        process.wait(10)
        machine.kill()
        if disk:
            subprocess.run(["umount", "--lazy", upper], check=True, timeout=30)


def _pid_one(outermost: int) -> int:
    """The machine's PID 1, once its sshd is up; before that 0."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{outermost}/task/{outermost}/children").read_text().split()
        return next((int(pid) for pid in children if Path(f"/proc/{pid}/root/run/booted").exists()), 0)
    return 0


def _path() -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def _only_outermost(paths: Sequence[str]) -> list[str]:
    return [one for one in paths if not any(one != other and one.startswith(f"{other}/") for other in paths)]


@contextlib.contextmanager
def site(folder: Path, number: int, *, small: int = 0) -> Iterator[tuple[Machine, Person, tuple[Bare, ...]]]:
    """A laptop (this machine's files, a person with a key) and that many fresh machines; the last have a small disk."""
    person = Person(folder / "me")
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o1777)
    fresh = base()
    with machines(number + 1, prefix="bare") as made, contextlib.ExitStack() as stack:
        *rest, laptop = made
        boxes = [
            stack.enter_context(
                bare(
                    one,
                    folder / one.name,
                    person,
                    fresh,
                    folder / "shared",
                    disk="16m" if i >= number - small else None,
                )
            )
            for i, one in enumerate(rest)
        ]
        yield laptop, person, tuple(boxes)
    if "DDPCTL_TEST_BARE_ROOT" not in os.environ:
        shutil.rmtree(fresh.parent)
