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


@pytest.mark.parametrize(
    ("text", "places"),
    [
        pytest.param("    runtime: none\n", ["3:5"], id="no-hosts"),
        pytest.param("    hosts: box1\n", ["4:12"], id="no-list"),
        pytest.param("    hosts: []\n", ["4:12"], id="empty"),
        pytest.param("    hosts: [a, b, a]\n", ["4:12"], id="twice"),
        pytest.param("    hosts: [-oProxyCommand=x, 'a b', 'a:99999']\n", ["4:13", "4:31", "4:38"], id="short-form"),
        pytest.param(
            "    hosts:\n      - {user: bob, prt: 3, gpus: 99}\n      - {address: '-x'}\n",
            ["5:9", "5:21", "5:35", "6:19"],
            id="long-form",
        ),
        pytest.param("    hosts: [a]\n    home: runs\n    project: here\n", ["5:11", "6:14"], id="paths"),
        pytest.param("    hosts: [a, b]\n    exclude: [c]\n", ["5:14"], id="exclude"),
    ],
)
def test_errors_have_line_and_column(text: str, places: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path)
    errors = [line for line in str(error.value).splitlines() if not line.startswith("--target")]
    assert [line.removeprefix(f"{tmp_path}/ddpctl.yaml:").partition(": ")[0] for line in errors] == places
