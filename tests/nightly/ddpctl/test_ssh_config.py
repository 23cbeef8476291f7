"""~/.ssh/config and known_hosts are read as OpenSSH reads them."""

import getpass
from pathlib import Path

import pytest
from paramiko import PKey, RSAKey
from paramiko.hostkeys import HostKeys

from ddpctl.command import Host
from ddpctl.execution import ssh
from ddpctl.execution.ssh import Connector, known_keys, read_settings


def key_line(key: PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "conf.d").mkdir(parents=True)
    return tmp_path


def test_hosts_that_the_configuration_does_not_distinguish_share_one_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings as each would get by itself, by fewer calls of ssh."""
    commands: list[str] = []

    def counted(host: Host, home: Path) -> dict[str, str]:
        commands.append(host.address)
        return read_settings(host, home)

    monkeypatch.setattr(ssh, "read_settings", counted)
    blocks = "Host box* !box9\n  User alice\n  ProxyCommand nc %h %p\nHost gate\n  HostName 10.0.0.1\n"
    names = ["box1", "box2", "box9", "10.0.0.2", "gate", "BOX3", "box4"]
    for text, alone in (
        (blocks, ["box1", "box9", "10.0.0.2", "gate", "BOX3"]),
        (f"{blocks}Host *\n  UserKnownHostsFile ~/%h\n", names),
        (f"{blocks}Match host box2\n  Port 7\n", names),
        (f"{blocks}Host box4\n  Include {home}/.ssh/conf.d/a\n", [name for name in names if name != "box2"]),
        ("Host box*\n  HostName box1\n", names),
    ):
        (home / ".ssh/config").write_text(text)
        (home / ".ssh/conf.d/a").write_text("User bob\n")
        connector = Connector(home)
        for name in names:
            got, own = connector._settings(Host(address=name)), read_settings(Host(address=name), home)
            own = {key: value for key, value in own.items() if key != "host"}
            assert {key: value for key, value in got.items() if key != "host"} == own
        assert commands == alone
        commands.clear()


def test_without_a_configuration_the_defaults_count(tmp_path: Path) -> None:
    settings = read_settings(Host(address="box"), tmp_path)
    assert settings["userknownhostsfile"].split() == [f"{tmp_path}/.ssh/known_hosts", f"{tmp_path}/.ssh/known_hosts2"]
    assert "~/.ssh/id_ed25519" in settings["identityfile"].splitlines()


def test_known_hosts_has_hashes_patterns_and_markers(home: Path) -> None:
    keys = [RSAKey.generate(1024) for _ in range(4)]
    first, two, three, bad = keys
    wide = key_line(two).replace(" ", "  ")
    path = home / "known_hosts"
    path.write_text(
        f"# a comment\n#none,box1 {key_line(three)}\n@other box1 {key_line(three)}\n"
        f"\nbox1,10.0.0.1 {key_line(first)}\n{HostKeys.hash_host('box2')} {key_line(two)}\n"
        f"*.lab,!evil.lab {key_line(three)}\n[box1]:2222 {key_line(two)}\n"
        f"@revoked  *   {key_line(bad)}\n@cert-authority * {key_line(three)}\nnot a line\n"
        f"spaced  {wide}\nbox1 ssh-rsa AAAAB\n"
    )
    names = ("box1", "BOX1", "10.0.0.1", "box2", "a.lab", "evil.lab", "[box1]:2222", "box3", "spaced")
    assert {name: known_keys([path, home / "gone"], name).keys for name in names} == {
        "box1": (first,),
        "BOX1": (first,),
        "10.0.0.1": (first,),
        "box2": (two,),
        "a.lab": (three,),
        "evil.lab": (),
        "[box1]:2222": (two,),
        "box3": (),
        "spaced": (two,),
    }
    assert known_keys([path], "box3").revoked == (bad,)


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
