"""~/.ssh/config and known_hosts are read as OpenSSH reads them."""

import getpass
from pathlib import Path

import pytest

from ddpctl.command import Host
from ddpctl.errors import ConfigError
from ddpctl.ssh import Connector, read_settings


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "conf.d").mkdir(parents=True)
    return tmp_path


def test_openssh_reads_the_configuration(home: Path) -> None:
    (home / ".ssh/config").write_text(
        f"Include {home}/.ssh/conf.d/*.conf\nHost box*\n  User alice\n  Include {home}/.ssh/late\n  Port 2200\n"
        f'Match host matched exec "test %n = matched"\n  User carol\n  IdentityFile {home}/%r-%h.key\n'
        f'Host *\n  User bob\n  UserKnownHostsFile "~/a b" /b\n  GlobalKnownHostsFile none\n'
        f'  IdentityFile "~{getpass.getuser()}/a key"\n'
    )
    (home / ".ssh/conf.d/a.conf").write_text("Host box1\n  HostName 10.0.0.1\n")
    (home / ".ssh/conf.d/b.conf").write_text("Host box2\n  HostName 10.0.0.2\n  ProxyJump gate:2222\n")
    (home / ".ssh/late").write_text("IdentityFile /keys/box\nHost other\n  Port 1\n")
    names = ("box1", "box2", "other", "matched", "none")
    settings = {name: read_settings(Host(address=name), home) for name in names}
    assert {name: (values["hostname"], values["user"], values["port"]) for name, values in settings.items()} == {
        "box1": ("10.0.0.1", "alice", "2200"),
        "box2": ("10.0.0.2", "alice", "2200"),
        "other": ("other", "bob", "22"),  # a Host inside an Include is one of the block around it
        "matched": ("matched", "carol", "22"),
        "none": ("none", "bob", "22"),
    }
    assert settings["box2"]["proxyjump"] == "gate:2222"
    assert settings["box1"]["identityfile"].splitlines()[0] == "/keys/box"
    assert settings["matched"]["identityfile"].splitlines()[0] == f"{home}/%r-%h.key"
    assert settings["none"]["userknownhostsfile"].splitlines() == [f"{home}/a b", "/b"]
    assert settings["none"]["globalknownhostsfile"] == ""
    assert Connector(home)._expand(settings["none"]["identityfile"], Host(address="none"), settings["none"]) == str(
        Path("~").expanduser() / "a key"
    )
    given = read_settings(Host(address="box1", user="dave", port=7), home)
    assert (given["user"], given["port"]) == ("dave", "7")


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
