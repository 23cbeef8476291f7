"""Hosts in a ddpctl.yaml: their short form, what is wrong with them by line and column, their record, their schema."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ddpctl import targets
from ddpctl.errors import ConfigError
from ddpctl.job import config
from ddpctl.job.launch_plan import Request
from ddpctl.targets.ssh.options import SshHost, SshOptions

HEAD = "targets:\n  boxes:\n    kind: ssh\n"


def load(text: str, tmp_path: Path) -> Request:
    (tmp_path / "ddpctl.yaml").write_text(HEAD + text)
    kinds = targets.kinds()
    return config.load(file=tmp_path / "ddpctl.yaml", target="boxes", kinds=kinds)


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
    assert targets.fill_options(SshOptions, json.loads(json.dumps(asdict(options)))) == options
    with pytest.raises(ConfigError, match="hosts"):
        targets.fill_options(SshOptions, {})
