"""The playbooks of ansible/: they parse, the example is an inventory, and what judges them finds faults."""

import json
import shutil
from pathlib import Path

from tests.unit.repository.test_playbooks import ANSIBLE, run


def test_the_example_is_an_inventory_of_four_machines() -> None:
    output = json.loads(run("ansible-inventory", "-i", "inventory.example.yaml", "--list").stdout)
    hosts = [f"10.0.0.{i}" for i in (1, 2, 3, 4)]
    assert {group: output[group]["hosts"] for group in ("nodes", "controller", "monitor")} == {
        "nodes": hosts,
        "controller": hosts[:1],
        "monitor": hosts[:1],
    }
    assert {host: output["_meta"]["hostvars"][host]["ddpctl_peer"] for host in hosts} == {host: host for host in hosts}


def test_yamllint_finds_a_planted_fault(tmp_path: Path) -> None:
    assert run("yamllint", "--strict", ".").stdout == ""
    planted = tmp_path / "planted.yaml"
    planted.write_text("---\nmode: 0644\nmode: 1\n")
    done = run("yamllint", "--strict", str(planted))
    assert done.returncode == 1
    assert "(octal-values)" in done.stdout
    assert "(key-duplicates)" in done.stdout


def test_ansible_lint_finds_a_planted_fault(tmp_path: Path) -> None:
    """A file that anybody may write, a shell where a command would do, a task without a name."""
    shutil.copytree(ANSIBLE, tmp_path / "ansible", ignore=shutil.ignore_patterns("__pycache__", ".ansible"))
    planted = tmp_path / "ansible" / "roles" / "clock" / "tasks" / "main.yaml"
    planted.write_text(
        planted.read_text() + "\n- ansible.builtin.shell: chronyc makestep\n"
        "\n- name: Open it\n  ansible.builtin.copy:\n    content: x\n    dest: /etc/x\n"
    )
    done = run("ansible-lint", "--nocolor", "-q", "-f", "pep8", "roles/clock/tasks/main.yaml", cwd=tmp_path / "ansible")
    assert done.returncode == 2, done.stdout + done.stderr
    for rule in ("command-instead-of-shell", "no-changed-when", "name[missing]", "risky-file-permissions"):
        assert rule in done.stdout, done.stdout
    assert "roles/clock/tasks/main.yaml" in done.stdout
