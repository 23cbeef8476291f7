"""Sets up machines of a target of kind ssh or of a Slurm cluster: the Ansible inventory, and the runs of a playbook.

The playbooks are in ansible/. A playbook first runs with ``--check``. Machines that fail this check are not changed,
and the others are set up.
"""

import json
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Literal, TypedDict

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.targets.ssh.options import SshHost, SshOptions

Playbook = Literal["site", "verify", "uninstall"]
_TAKEN = frozenset({"all", "ungrouped", "nodes", "controller", "monitor", "storage"})
TRAINER = "ddp"  # the user who trains, if a host names none
_INTERRUPTED = 99  # exit code of ansible-playbook after Ctrl-C
_HEAD = "# Written by ddpctl provision. To keep what you change: ddpctl provision --inventory THIS_FILE\n"


class HostResult(TypedDict):
    """The result for one machine."""

    changed: int  # number of tasks that changed something, or would change something
    failed: str  # why it failed; empty if it did not


def inventory_text(
    options: SshOptions, *, login: str | None, keys: Sequence[str], image: str | None, places: Mapping[str, str]
) -> str:
    """Return the Ansible inventory of a target's hosts as the text of a file. Raises ConfigError.

    ``login`` sets the machines up (None: the user who trains). ``keys`` are public keys of the users who may train.
    ``image`` is the image that the machines need. ``places`` maps a group to the address of its only host.
    """
    import yaml

    hosts = {host.address: _variables(host, login) for host in options.hosts}
    if len(hosts) < len(options.hosts):
        raise ConfigError("provision: two hosts have the same address: list each machine once")
    for host in options.hosts:
        _check_name(host.address)
        peer = host.peer or host.address
        if len(hosts) > 1 and (peer == "localhost" or ((peer_ip := _ip(peer)) and peer_ip.is_loopback)):
            raise ConfigError(
                f"provision: {peer} is a loopback address, at which other hosts cannot reach "
                "this host: set its `peer` to another address"
            )
    groups: dict[str, Any] = {"nodes": {"hosts": hosts}}
    for group, address in places.items():
        host = SshHost.from_text(address)
        _check_name(host.address)
        # A node has its variables above; a machine that is not a node gets them here.
        groups[group] = {"hosts": {host.address: {} if address in hosts else _variables(host, login)}}
    shared = {
        "ddpctl_authorized_keys": list(keys),
        "ddpctl_containers": options.runtime,
        "ddpctl_image": image or "",
    }
    return _HEAD + yaml.safe_dump({"all": {"vars": shared, "children": groups}}, sort_keys=False, width=118)


def _check_name(address: str) -> None:
    """Check that Ansible does not read the address as a group or a port. Raises ConfigError."""
    if address in _TAKEN:
        raise ConfigError(
            f"provision: '{address}' is the name of an Ansible group and cannot name a host: use the machine's "
            "address or full name"
        )
    if ":" in address and _ip(address) is None:
        raise ConfigError(f"provision: {address!r} is neither a host name nor an IP address: set the port with `port`")


def _ip(address: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(address)
    except ValueError:
        return None


def _variables(host: SshHost, login: str | None) -> dict[str, Any]:
    variables = {
        "ansible_host": host.address,
        "ansible_user": login or host.user,
        "ansible_port": host.port,
        "ansible_ssh_private_key_file": host.key,
        "ddpctl_peer": host.peer or host.address,
        "ddpctl_user": host.user or TRAINER,
    }
    return {name: value for name, value in variables.items() if value is not None}


def set_up(
    argv: Sequence[str], extra: Sequence[str] = (), *, folder: str, recap: str, playbook: Playbook, check: bool
) -> Verb[dict[str, HostResult]]:
    """Run the playbook with ``--check``, and then without this option on the machines that passed the check.

    The second run is skipped if ``check``, or if there is nothing to change. The playbook ``verify`` runs only once,
    without ``--check``. Raises UnavailableError and KeyboardInterrupt.

    ``argv`` and ``extra``: the program ansible-playbook with its first options, and further arguments. ``folder``: the
    folder of the playbooks. ``recap``: the file into which a playbook writes the result of each machine.
    """
    env = {"ANSIBLE_CONFIG": f"{folder}/ansible.cfg", "DDPCTL_RECAP": recap, "LC_ALL": "C.UTF-8"}

    def play(*options: str) -> Verb[dict[str, HostResult]]:
        yield (Command(argv=("rm", "-f", recap)),)  # the result of an earlier call
        command = (*argv, f"{folder}/{playbook}.yaml", *options, *extra)
        (played,) = yield (Command(argv=command, env=env, mode="tty", kills_orphans=True, timeout_s=None),)
        (result,) = yield (Command(argv=("cat", recap), placeholder='{"HOST": {"changed": 1, "failed": ""}}'),)
        if played.returncode == _INTERRUPTED:
            raise KeyboardInterrupt
        if result.returncode:
            ending = f"ansible-playbook exited with {played.returncode} before it reached a machine"
            raise UnavailableError(f"{ending}: see its output above")
        return json.loads(result.stdout)  # type: ignore[no-any-return]

    if playbook == "verify":
        return (yield from play())
    looked = yield from play("--check")
    sound = [host for host, fared in looked.items() if not fared["failed"]]
    if check or not any(looked[host]["changed"] for host in sound):
        return looked
    only = () if len(sound) == len(looked) else (f"--limit={','.join(sound)}",)
    return {**looked, **(yield from play(*only))}
