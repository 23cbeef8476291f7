"""Hosts in a ddpctl.yaml: their short form, what is wrong with them by line and column, their record, their schema."""

import json
from dataclasses import asdict
from pathlib import Path

import jsonschema
import pytest
import yaml

from ddpctl import config, targets
from ddpctl.errors import ConfigError
from ddpctl.targets.ssh import SshHost, SshOptions

HEAD = "targets:\n  boxes:\n    kind: ssh\n"


def load(text: str, tmp_path: Path) -> config.Settings:
    (tmp_path / "ddpctl.yaml").write_text(HEAD + text)
    kinds = targets.kinds()
    return config.load(file=tmp_path / "ddpctl.yaml", profile=None, target="boxes", overrides={}, kinds=kinds)


WHOLE = """\
    hosts:
      - box1
      - alice@10.0.0.2:2222
      - "[fe80::1]:22"
      - {address: box4, user: bob, port: 23, key: ~/.ssh/box, peer: 10.0.0.4, gpus: 2}
    runtime: podman
"""


def test_hosts_are_written_short_or_long(tmp_path: Path) -> None:
    options = load(WHOLE, tmp_path).options
    assert options == SshOptions(
        hosts=(
            SshHost(address="box1"),
            SshHost(address="10.0.0.2", user="alice", port=2222),
            SshHost(address="fe80::1", port=22),
            SshHost(address="box4", user="bob", port=23, key="~/.ssh/box", peer="10.0.0.4", gpus=2),
        ),
        runtime="podman",
    )
    assert targets.fill_options("ssh", json.loads(json.dumps(asdict(options)))) == options


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("    runtime: none\n", ["3:5: target 'boxes' needs 'hosts': list"]),
        ("    hosts: box1\n", ["4:12: hosts: takes a list, not a single value"]),
        ("    hosts: []\n", ["4:12: hosts: at least one host"]),
        ("    hosts: [a, b, a]\n", ["4:12: hosts: a is there twice, and a host runs one node"]),
        (
            "    hosts: [-oProxyCommand=x, 'a b', 'a:99999']\n",
            [
                f"4:{column}: hosts: an entry is USER@ADDRESS:PORT, of which ADDRESS is enough, or keys and values"
                for column in (13, 31, 38)
            ],
        ),
        (
            "    hosts:\n      - {user: bob, prt: 3, gpus: 99}\n      - {address: '-x'}\n",
            [
                "5:9: an entry of hosts needs 'address': text",
                "5:21: 'prt' is no key of an entry of hosts; did you mean 'port'?",
                "5:35: gpus: 99 is too large: from 0 to 64",
                "6:19: address: '-x' is not allowed: a name of ~/.ssh/config, a host name or an IP address",
            ],
        ),
        (
            "    hosts: [a]\n    home: runs\n    project: here\n",
            [
                "5:11: home: 'runs' is not allowed: a path that begins with / or ~/, without ':' or ','",
                "6:14: project: 'here' is not allowed: a path that begins with / or ~/, without ':' or ','",
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_by_line_and_column(text: str, errors: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path)
    found = [line.removeprefix(f"{tmp_path}/ddpctl.yaml:") for line in str(error.value).splitlines()]
    assert [line for line in found if not line.startswith("--target")] == errors


def test_an_editor_knows_hosts() -> None:
    schema = config.schema(targets.kinds())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(HEAD + WHOLE), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(HEAD + "    hosts: [{user: bob}]\n"), schema)
