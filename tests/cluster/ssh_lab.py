"""Real sshds for the target ssh: machines with an address, a host key and a home of their own.

A machine is a network namespace (bench/lab.py, needs root) or an address of the loopback. Everything lies in one
folder; the client's home in it has the key, the known_hosts and the config of a person who may log in.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.lab import Machine
from tests import forks
from tests.e2e.driver import wait_until

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/bin")
KEYGEN = shutil.which("ssh-keygen", path="/usr/bin:/bin")
MISSING = None if SSHD and KEYGEN else "needs sshd and ssh-keygen (apt install openssh-server)"
PACKAGES = os.pathsep.join(forks.PACKAGES)
ROOT_MISSING = MISSING or (None if os.geteuid() == 0 and shutil.which("ip") else "needs root and iproute2")


def make_key(path: Path, kind: str = "ed25519") -> str:
    """A new key without a passphrase; its public half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in (path, path.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    subprocess.run([str(KEYGEN), "-q", "-t", kind, "-N", "", "-f", path], check=True, timeout=30)
    return path.with_suffix(".pub").read_text().strip()


def fingerprint(public_key: str) -> str:
    """``SHA256:...`` as ssh-keygen prints it."""
    done = subprocess.run([str(KEYGEN), "-lf", "-"], input=public_key, capture_output=True, text=True, timeout=30)
    return done.stdout.split()[1]


@dataclass
class Person:
    """Who logs in: a home with .ssh."""

    home: Path
    public_key: str = ""
    config: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.public_key = make_key(self.home / ".ssh" / "id_ed25519")
        self.known_hosts.touch()

    @property
    def known_hosts(self) -> Path:
        """The file."""
        return self.home / ".ssh" / "known_hosts"

    def trusts(self, name: str, public_key: str) -> None:
        """Put a host's key into known_hosts."""
        with self.known_hosts.open("a") as file:
            file.write(f"{name} {' '.join(public_key.split()[:2])}\n")


@dataclass
class Box:
    """A machine with an sshd."""

    folder: Path
    address: str
    port: int
    host_key: str  # public
    home: Path  # what HOME is for who logs in
    argv: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def known_name(self) -> str:
        """What known_hosts calls it."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"

    def start(self) -> None:
        """Start sshd, again if it was killed, and wait until it listens."""
        self.kill()
        output = self.folder / "sshd.log"
        with output.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv, stdout=log, stderr=log, env={"PATH": PATH}, start_new_session=True
            )
        wait_until(lambda: b"Server listening" in output.read_bytes(), "sshd", timeout_s=30)

    def kill(self) -> None:
        """sshd and its sessions, at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def box(
    folder: Path,
    person: Person,
    *,
    address: str,
    listen: Sequence[str] = (),
    port: int = 22,
    machine: Machine | None = None,
    environ: Mapping[str, str] | None = None,
    trusted: bool = True,
) -> Iterator[Box]:
    """An sshd on ``address`` (or on all of ``listen``) that lets the person in as the user of this process."""
    home = folder / "home"
    home.mkdir(parents=True)
    host_key = make_key(folder / "host_key")
    (folder / "authorized_keys").write_text(person.public_key + "\n")
    variables = {"HOME": home, "PATH": f"{os.defpath}:/usr/sbin", "PYTHONPATH": PACKAGES, **(environ or {})}
    settings = [
        *(f"ListenAddress {listened}:{port}" for listened in listen or (address,)),
        f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        f"PidFile {folder}/pid",
        # The first SetEnv of a configuration counts, so that there is one.
        f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "MaxStartups 200",
        "UseDNS no",
        "PrintMotd no",
    ]
    (folder / "sshd_config").write_text("\n".join(settings) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    argv = [str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]
    argv = machine.command(*argv) if machine else ["setpriv", "--pdeathsig=KILL", *argv]  # it ends with the tests
    made = Box(folder=folder, address=address, port=port, host_key=host_key, home=home, argv=argv)
    if trusted:
        person.trusts(made.known_name, host_key)
    try:
        made.start()
        yield made
    finally:
        made.kill()
