"""The playbooks of ansible/ and the workflows under .github: valid, bounded, and what judges them finds faults."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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


FOLDER = Path(__file__).parents[3] / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yaml"))
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


def jobs(file: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    return workflow


def test_every_action_is_a_commit_and_every_job_has_an_end_and_no_right_that_it_does_not_name() -> None:
    assert [file.name for file in FILES] == ["ci.yaml", "release.yaml"]
    for file in FILES:
        uses = re.findall(r"uses: *(.*)", file.read_text())
        assert uses
        assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []
        assert yaml.safe_load(file.read_text())["permissions"] == {}
        for name, job in jobs(file).items():
            assert job["timeout-minutes"] <= 60, name
            assert job["permissions"], name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_step_that_runs_is_sound_shell(file: Path, tmp_path: Path) -> None:
    scripts = [step["run"] for job in jobs(file).values() for step in job["steps"] if "run" in step]
    assert scripts
    paths = [tmp_path / f"{number}.sh" for number in range(len(scripts))]
    for path, script in zip(paths, scripts, strict=True):
        assert "${{" not in script, f"an expression in a script is an injection: {script}"
        path.write_text(script)
    done = subprocess.run([SHELLCHECK, "--shell=bash", *paths], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
