"""A person with fresh machines (bare_lab) and a page to follow: ansible/README.md, whose commands are run on them."""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.lab import Machine
from tests.cluster.ssh_lab import PACKAGES, Person
from tests.e2e.driver import ROOT
from tests.nightly.ssh.bare_lab import Bare

README = (ROOT / "ansible" / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [re.sub(r"\s+#.*", "", line) for kind, block in BLOCKS if not kind for line in block.splitlines()]
RAN: list[str] = []
GOOD = 2
# More cores than there are, for the script's --cpus-per-task=4; and what else the machines really have.
LAB = {"slurm_cpus": 8, "slurm_conf_extra": ["SlurmdParameters=config_overrides"], "firewall_monitor": ["10.77.0.99"]}


@dataclass
class Site:
    folder: Path
    laptop: Machine
    person: Person
    boxes: tuple[Bare, ...]

    @property
    def good(self) -> tuple[Bare, ...]:
        return self.boxes[:GOOD]

    def environ(self) -> dict[str, str]:
        ssh = f"-F {self.folder / 'ssh_config'} -o ControlMaster=auto -o ControlPersist=30s"
        bin_ = Path(sys.executable).parent
        return {
            "HOME": str(self.person.home),
            "PATH": f"{bin_}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": PACKAGES,
            "LC_ALL": "C.UTF-8",
            "DDPCTL_STATE_DIR": str(self.folder / "state" / "runs"),
            "ANSIBLE_SSH_ARGS": ssh,
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "cp"),
        }

    def run(self, *argv: str, code: int = 0) -> str:
        """What a command says on the laptop, in the project's folder."""
        done = subprocess.run(
            self.laptop.command(*argv),
            env=self.environ(),
            cwd=self.folder / "project",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def shown(self, start: str, *more: str, code: int = 0) -> str:
        """The command of the README that begins so, with the lab's addresses in the place of its own."""
        (line,) = (line for line in COMMANDS if re.match(start, line))
        RAN.append(line)
        return self.run("env", *shlex.split(self.here(line)), *more, code=code)

    def here(self, text: str) -> str:
        for i, box in enumerate(self.good, 1):
            text = text.replace(f"10.0.0.{i}", box.address)
        return text
