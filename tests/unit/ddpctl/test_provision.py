"""ddpctl provision: the inventory out of a configuration, the lines, what a first look decides. Starts no Ansible."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import UnavailableError
from ddpctl.operations.provision import HostResult, Playbook, inventory_text, set_up
from ddpctl.targets.ssh.options import SshHost, SshOptions

ANSIBLE, RECAP = "/v/ansible-playbook", "/s/recap.json"


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
    return Output(returncode=0)


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


def test_an_ansible_that_reached_no_machine_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="ansible-playbook"):
        play(provisioning(), None)
