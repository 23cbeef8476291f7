"""ddpctl provision: the inventory out of a configuration, the lines, what a first look decides. Starts no Ansible."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.driver import ROOT
from tests.in_process import ddpctl
from tests.unit.ddpctl.test_provision import fared, play, provisioning

from ddpctl.errors import ConfigError
from ddpctl.operations.provision import inventory_text
from ddpctl.targets.ssh.options import SshHost, SshOptions

SITE: dict[str, Any] = {"login": "root", "keys": ["ssh-ed25519 AAAA me@laptop"], "image": None, "places": {}}
FILE = """\
job: {name: digits, nodes: 2}
targets:
  boxes: {kind: ssh, runtime: none, hosts: [ddp@box1, "ddp@10.0.0.2:2222"]}
  here: {kind: local}
"""


def options(*texts: str) -> SshOptions:
    return SshOptions(hosts=tuple(SshHost.from_text(text) for text in texts))


@pytest.mark.parametrize("name", ["all", "ungrouped", "nodes", "controller", "monitor", "storage"])
def test_a_host_named_as_a_group_of_ansibles_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        inventory_text(options("box1", name), **SITE)
    assert repr(name) in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        inventory_text(options("box1"), **SITE | {"places": {"monitor": name}})
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["localhost", "127.0.1.1", "::1"])
def test_a_name_that_every_machine_has_for_itself_is_refused_among_others(name: str) -> None:
    own = SshHost(address=name)
    with pytest.raises(ConfigError) as refused:
        inventory_text(SshOptions(hosts=(own, SshHost(address="box1"))), **SITE)
    assert (name in str(refused.value), "`peer`" in str(refused.value)) == (True, True)
    reached = SshOptions(hosts=(replace(own, peer="10.0.0.1"), SshHost(address="box1")))
    for hosts, names in ((reached, [name, "box1"]), (SshOptions(hosts=(own,)), [name])):
        inventory = yaml.safe_load(inventory_text(hosts, **SITE))
        assert list(inventory["all"]["children"]["nodes"]["hosts"]) == names


def test_a_port_within_a_name_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        inventory_text(SshOptions(hosts=(SshHost(address="box1:22"),)), **SITE)
    assert ("'box1:22'" in str(refused.value), "`port`" in str(refused.value)) == (True, True)


def test_names_that_yaml_might_take_for_values_reach_ansible_as_they_are(tmp_path: Path) -> None:
    names = ["yes", "1e3", "10", "null", "0x1f", "1_000", "2026-11-20", "fd00::1", "1.5"]
    file = tmp_path / "inventory.yaml"
    file.write_text(inventory_text(SshOptions(hosts=tuple(SshHost(address=name) for name in names)), **SITE))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-inventory", "-i", file, "--list"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    output = json.loads(done.stdout)
    assert output["nodes"]["hosts"] == names, done.stderr
    for name in names:
        values = output["_meta"]["hostvars"][name]
        assert (values["ansible_host"], values["ddpctl_peer"], values["ansible_user"]) == (name, name, "root")


def test_who_trains_is_ddp_where_nobody_is_named_and_logs_in_as_ssh_has_it() -> None:
    text = inventory_text(SshOptions(hosts=(SshHost(address="box1"),)), login=None, keys=(), image=None, places={})
    assert "ansible_user" not in text
    assert re.findall("ddpctl_user: .*", text) == ["ddpctl_user: ddp"]


def test_two_hosts_of_one_address_are_refused() -> None:
    hosts = (SshHost(address="box1", port=22), SshHost(address="box1", port=23))
    with pytest.raises(ConfigError):
        inventory_text(SshOptions(hosts=hosts), **SITE)


def test_an_uninstall_looks_first_as_well_and_hands_words_on() -> None:
    verb = provisioning("-e", "user_remove=true", playbook="uninstall")
    lines, _ = play(verb, {"box1": fared(1)}, {"box1": fared(1)})
    assert lines == [
        "/v/ansible-playbook --inventory=/s/boxes.yaml /p/uninstall.yaml --check -e user_remove=true",
        "/v/ansible-playbook --inventory=/s/boxes.yaml /p/uninstall.yaml -e user_remove=true",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (("--target", "here"), 78, "'here'"),
        (("--inventory", "no.yaml"), 66, "no.yaml"),
        (("--target", "boxes", "--public-key", "no.pub"), 66, "no.pub"),
        (("--target", "boxes", "--login", "a b"), 2, "--login 'a b'"),
        (("--target", "boxes", "--login", "-x"), 2, "--login '-x'"),
        (("--target", "boxes", "--public-key", "me.pub", "--monitor", "a b"), 2, "--monitor 'a b'"),
        (("--verify", "--check"), 2, "--verify"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_refusal_of_provision_is_one_line_that_names_its_cause(
    arguments: tuple[str, ...], code: int, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "ddpctl.yaml").write_text(FILE)
    (tmp_path / "me.pub").write_text("ssh-ed25519 AAAA me@laptop\n")
    done = ddpctl("provision", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert cause in done.stderr


@pytest.mark.parametrize(
    ("changes", "recap", "arguments"),
    [
        ({}, fared(0), " /p/site.yaml --check"),  # nothing to do: nothing is done
        ({}, fared(2, "lost"), " /p/site.yaml --check"),  # nobody is left
        ({"check": True}, fared(5), " /p/site.yaml --check"),
        ({"playbook": "verify", "tags": "--tags=user,slurm"}, fared(0), " --tags=user,slurm /p/verify.yaml"),
    ],
)
def test_one_playbook_is_enough(changes: dict[str, Any], recap: dict[str, object], arguments: str) -> None:
    lines, _ = play(provisioning(**changes), {"box1": recap})
    assert lines == [f"/v/ansible-playbook --inventory=/s/boxes.yaml{arguments}"]


def test_a_dry_run_shows_the_lines_and_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "ddpctl.yaml").write_text(FILE)
    (tmp_path / "me.pub").write_text("ssh-ed25519 AAAA me@laptop\n")
    done = ddpctl("provision", "-t", "boxes", "--login", "root", "--public-key", "me.pub", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = tmp_path / "runs" / ".provision"
    assert (done.stderr, state.exists()) == ("", False)
    environ = f"ANSIBLE_CONFIG={ROOT}/ansible/ansible.cfg DDPCTL_RECAP={state}/recap.json LC_ALL=C.UTF-8"
    lines = [line for line in done.stdout.splitlines() if "ansible-playbook" in line]
    assert [re.sub(r" \S+/ansible-playbook ", " ansible-playbook ", line) for line in lines] == [
        f"{environ} ansible-playbook --inventory={state}/boxes.yaml {ROOT}/ansible/site.yaml --check",
        f"{environ} ansible-playbook --inventory={state}/boxes.yaml {ROOT}/ansible/site.yaml",
    ]
    options = SshOptions(hosts=(SshHost.from_text("ddp@box1"), SshHost.from_text("ddp@10.0.0.2:2222")), runtime="none")
    first, _, rest = done.stdout.partition("\n")
    assert f"{state}/boxes.yaml" in first
    assert rest.startswith(f"{inventory_text(options, **SITE)}\n")
