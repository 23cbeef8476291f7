"""The playbooks of ansible/: they parse, the example is an inventory, and what judges them finds faults."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
ANSIBLE = ROOT / "ansible"
BIN = Path(sys.executable).parent


def run(*argv: str, cwd: Path = ANSIBLE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{BIN}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    return subprocess.run(
        [str(BIN / argv[0]), *argv[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )


def test_the_playbooks_parse() -> None:
    names = ["site.yaml", "verify.yaml", "uninstall.yaml"]
    done = run("ansible-playbook", "--syntax-check", "-i", "inventory.example.yaml", *names)
    assert done.returncode == 0, done.stderr
    assert re.findall("^playbook: (.*)", done.stdout, re.M) == names


def test_every_role_can_be_done_looked_at_and_undone() -> None:
    roles = {path.name for path in (ANSIBLE / "roles").iterdir()} - {"look"}
    for role in roles:
        assert {"main.yaml", "verify.yaml", "uninstall.yaml"} <= {
            path.name for path in (ANSIBLE / "roles" / role / "tasks").iterdir()
        }
    for playbook in ("site", "verify", "uninstall"):
        plays = yaml.safe_load((ANSIBLE / f"{playbook}.yaml").read_text())
        used = [role["role"] for play in plays for role in play.get("roles", ())]
        used += [task["ansible.builtin.import_role"]["name"] for play in plays for task in play.get("tasks", ())]
        assert sorted(used) == sorted(roles | {"look"}), playbook
