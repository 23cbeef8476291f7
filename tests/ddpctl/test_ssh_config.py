"""~/.ssh/config and known_hosts are read as OpenSSH reads them."""

from pathlib import Path

import pytest
from paramiko import PKey, RSAKey
from paramiko.hostkeys import HostKeys

from ddpctl.errors import ConfigError
from ddpctl.ssh_config import known_hosts_files, known_keys, read_config


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "conf.d").mkdir(parents=True)
    return tmp_path


def test_include_stands_where_it_stands(home: Path) -> None:
    (home / ".ssh/config").write_text(
        "Include conf.d/*.conf\nHost box*\n  User alice\n  Include ~/.ssh/late\n  Port 2200\nHost *\n  User bob\n"
    )
    (home / ".ssh/conf.d/a.conf").write_text("Host box1\n  HostName 10.0.0.1\n")
    (home / ".ssh/conf.d/b.conf").write_text("Host box2\n  HostName 10.0.0.2\n  ProxyJump gate:2222\n")
    (home / ".ssh/late").write_text("IdentityFile /keys/box\nHost other\n  Port 1\n")
    config = read_config(home)
    found = {name: config.lookup(name) for name in ("box1", "box2", "other", "none")}
    assert {name: (said["hostname"], said["user"], said.get("port")) for name, said in found.items()} == {
        "box1": ("10.0.0.1", "alice", "2200"),
        "box2": ("10.0.0.2", "alice", "2200"),
        "other": ("other", "bob", "1"),
        "none": ("none", "bob", None),
    }
    assert found["box2"]["proxyjump"] == "gate:2222"
    assert found["box1"]["identityfile"] == ["/keys/box"]


def test_an_include_of_itself_is_refused(home: Path) -> None:
    (home / ".ssh/config").write_text("Include config\n")
    with pytest.raises(ConfigError) as error:
        read_config(home)
    assert str(error.value) == (
        f"~/.ssh/config cannot be read: {home}/.ssh/config: Include in an Include, more than 16 deep"
    )


def key_line(key: PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


def test_known_hosts_has_hashes_patterns_and_markers(home: Path) -> None:
    keys = [RSAKey.generate(1024) for _ in range(4)]
    one, two, three, bad = keys
    path = home / "known_hosts"
    path.write_text(
        f"# a comment\n\nbox1,10.0.0.1 {key_line(one)}\n{HostKeys.hash_host('box2')} {key_line(two)}\n"
        f"*.lab,!evil.lab {key_line(three)}\n[box1]:2222 {key_line(two)}\n"
        f"@revoked * {key_line(bad)}\n@cert-authority * {key_line(three)}\nnot a line\n"
    )
    names = ("box1", "BOX1", "10.0.0.1", "box2", "a.lab", "evil.lab", "[box1]:2222", "box3")
    assert {name: known_keys([path, home / "gone"], name).keys for name in names} == {
        "box1": (one,),
        "BOX1": (one,),
        "10.0.0.1": (one,),
        "box2": (two,),
        "a.lab": (three,),
        "evil.lab": (),
        "[box1]:2222": (two,),
        "box3": (),
    }
    assert known_keys([path], "box3").revoked == (bad,)


def test_known_hosts_files(home: Path) -> None:
    assert known_hosts_files({"userknownhostsfile": "~/a /b", "globalknownhostsfile": "none"}, home) == (
        home / "a",
        Path("/b"),
    )
    assert known_hosts_files({}, home)[0] == home / ".ssh/known_hosts"
