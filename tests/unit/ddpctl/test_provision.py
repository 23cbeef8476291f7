"""ddpctl provision: the inventory out of a configuration, the lines, what a first look decides. Starts no Ansible."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names, refused

from ddpctl.command import Command, Output, Verb
from ddpctl.commands import machines
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.operations.provision import HostResult, Playbook, inventory_text, set_up
from ddpctl.targets.ssh.options import SshHost, SshOptions

ANSIBLE, RECAP, INTERRUPTED = "/v/ansible-playbook", "/s/recap.json", 99


def provisioning(*extra: str, tags: str = "", playbook: Playbook = "site", check: bool = False) -> Any:
    """The verb of ``ddpctl provision`` with these arguments."""
    argv = (ANSIBLE, "--inventory=/s/boxes.yaml", *([tags] if tags else []))
    return set_up(argv, extra, folder="/p", recap=RECAP, playbook=playbook, check=check)


def play(verb: Verb[dict[str, HostResult]], *recaps: object) -> tuple[list[str], dict[str, HostResult]]:
    """The playbooks' command lines, and what the verb returns when they end with these recaps."""
    lines, remaining = [], list(recaps)
    commands = next(verb)
    try:
        while True:
            (command,) = commands
            lines += [" ".join(command.argv)] if command.argv[0] == ANSIBLE else []
            commands = verb.send((answer(command, remaining),))
    except StopIteration as stop:
        assert remaining == []
        return lines, stop.value


def answer(command: Command, remaining: list[object]) -> Output:
    if command.argv == ("cat", RECAP):
        recap = remaining.pop(0)
        return Output(returncode=1) if recap is None else Output(returncode=0, stdout=json.dumps(recap))
    assert command.argv[0] in (ANSIBLE, "rm")
    assert (command.mode, command.kills_orphans, command.timeout_s) == ("tty", True, None) or command.argv[0] == "rm"
    return Output(returncode=INTERRUPTED if "--check" in command.argv and None in remaining[1:] else 0)


def fared(changed: int = 0, failed: str = "") -> dict[str, object]:
    return {"changed": changed, "failed": failed}


def test_an_inventory_has_the_hosts_and_values_of_the_configuration(snapshot: Callable[..., None]) -> None:
    hosts = (
        SshHost(address="box1", user="ddp", peer="10.0.0.1"),
        SshHost(address="10.0.0.2", user="ddp", port=2222, key="~/.ssh/boxes"),
    )
    text = inventory_text(
        SshOptions(hosts=hosts),
        login="root",
        keys=("ssh-ed25519 AAAA me@laptop",),
        image="ghcr.io/me/train:1",
        places={"controller": "box1", "monitor": "admin@mon1"},
    )
    snapshot(text)


def test_a_look_comes_first_and_what_is_broken_is_left_alone() -> None:
    looked = {"box1": fared(7), "box2": fared(3, "its disk is full"), "box3": fared(7)}
    lines, result = play(provisioning(), looked, {"box1": fared(7), "box3": fared(0, "lost")})
    assert lines == [
        "/v/ansible-playbook --inventory=/s/boxes.yaml /p/site.yaml --check",
        "/v/ansible-playbook --inventory=/s/boxes.yaml /p/site.yaml --limit=box1,box3",
    ]
    assert result == {
        "box1": HostResult(changed=7, failed=""),
        "box2": HostResult(changed=3, failed="its disk is full"),
        "box3": HostResult(changed=0, failed="lost"),
    }


def test_an_ansible_that_reached_no_machine_is_an_error_and_an_interruption_none() -> None:
    with pytest.raises(UnavailableError, match="ansible-playbook"):
        play(provisioning(), None)
    with pytest.raises(KeyboardInterrupt):
        play(provisioning(), {"box1": fared(7)}, None)


def test_a_verification_runs_once_and_changes_nothing() -> None:
    lines, _ = play(provisioning(playbook="verify"), {"box1": fared(7)})
    assert lines == ["/v/ansible-playbook --inventory=/s/boxes.yaml /p/verify.yaml"]


@pytest.mark.parametrize("names", [("all",), ("box1", "box1"), ("box1", "127.0.0.1"), ("box1", "localhost"), ("a:1",)])
def test_hosts_that_ansible_or_the_other_hosts_would_mistake_are_refused(names: tuple[str, ...]) -> None:
    options = SshOptions(hosts=tuple(SshHost(address=name) for name in names))
    with refused(ConfigError, *(name for name in names[-1:] if len({*names}) == len(names))):
        inventory_text(options, login=None, keys=(), image=None, places={})


def test_provision_writes_its_inventory_and_has_a_folder_for_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, key = tmp_path / "ansible-playbook", tmp_path / "key.pub"
    program.write_text("""#!/bin/sh\necho '{"b1": {"changed": 0, "failed": ""}}' >"$DDPCTL_RECAP"\n""")
    program.chmod(0o755)
    key.write_text("ssh-ed25519 AAAA me@laptop\n")
    (tmp_path / "ddpctl.yaml").write_text("targets: {boxes: {kind: ssh, hosts: [b1]}}\n")
    monkeypatch.setattr(machines, "_ansible", lambda **_: str(program))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    line = ("provision", "--target", "boxes", "--public-key", str(key))
    done = ddpctl(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    inventory = Path(os.environ["DDPCTL_STATE_DIR"], ".provision/boxes.yaml").read_text()
    assert_names(inventory, "b1", "ssh-ed25519 AAAA me@laptop")
    for flags in (("--login", "-x"), ("--verify", "--check"), ("--monitor", "a b")):
        assert ddpctl(*line, *flags, cwd=tmp_path).returncode == 2
