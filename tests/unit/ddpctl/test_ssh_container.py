"""Whole command lines of a node's container."""

import pytest

from ddpctl.errors import ConfigError
from ddpctl.targets.ssh.scripts import env_file


def test_an_environment_file_holds_no_line_ends() -> None:
    assert env_file({"A": "b c", "B": ""}) == "A=b c\nB=\n"
    with pytest.raises(ConfigError, match="KEY"):
        env_file({"KEY": "two\nlines"})
