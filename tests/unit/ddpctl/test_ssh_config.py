"""~/.ssh/config and known_hosts are read as OpenSSH reads them."""

from pathlib import Path

import pytest

from ddpctl.command import Host
from ddpctl.errors import ConfigError
from ddpctl.execution.ssh import read_settings


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "conf.d").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cause"), [("Include {home}/.ssh/config\n", "recursive"), ("Bogus x\n", "line 1: .*bogus")]
)
def test_a_wrong_configuration_is_refused_with_openssh_s_own_error(home: Path, text: str, cause: str) -> None:
    (home / ".ssh/config").write_text(text.format(home=home))
    with pytest.raises(ConfigError, match=f"~/.ssh/config: .*{cause}"):
        read_settings(Host(address="box"), home)


def test_without_openssh_it_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(ConfigError, match="OpenSSH"):
        read_settings(Host(address="box"), home)
