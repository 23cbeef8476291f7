"""Opens SSH connections with an agent, keys and jump hosts. The keys of all hosts must be in known_hosts.

OpenSSH reads ~/.ssh/config (``ssh -G``), and Fabric makes the connection. By default, Fabric accepts unknown host
keys, so this module checks them.
"""

import getpass
import hmac
import logging
import os
import pwd
import re
import shlex
import socket
import subprocess
import threading
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from fabric import Config, Connection
from paramiko import MissingHostKeyPolicy, PKey, SSHClient, SSHConfig, Transport
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    NoValidConnectionsError,
    PasswordRequiredException,
    SSHException,
)

from ddpctl.command import Host
from ddpctl.environment import tool_environment
from ddpctl.errors import ConfigError
from ddpctl.text import one_line

_KNOWN_HOSTS = ("userknownhostsfile", "globalknownhostsfile")
_CONFIG = "~/.ssh/config"  # for messages
_FILES = "ddpctl: configuration files"  # the key of the files that OpenSSH has read
_UNCHANGED = r"[a-z][a-z\d.-]*|\d+(\.\d+){3}"  # addresses that OpenSSH does not change
_EXPANDED_HERE = ("identityfile", "proxycommand", "controlpath")  # ssh -G does not replace the tokens in these
_OPTIONS = (  # of OpenSSH's client, for the same behavior as Fabric's connections
    "BatchMode=yes StrictHostKeyChecking=yes ForwardAgent=no ClearAllForwardings=yes ControlPath=none "
    "RemoteCommand=none ServerAliveInterval=4 ServerAliveCountMax=2"
)
CONFIG_S = 10.0  # a Match in the configuration may run a program
CONNECT_S = 6.0  # for each of TCP, the banner and the login
MAX_HOPS = 8


def read_settings(host: Host, home: Path) -> dict[str, str]:
    """Return the settings of a host according to ``ssh -G``. The key ``_FILES`` has the files that OpenSSH has read.

    Several values of a key are separated by line breaks. Raises ConfigError.
    """
    own, settings = _own_home(home), dict[str, str]()
    argv = ["ssh", "-G", "-T", "-v", *config_of(home), *_login_flags(host), "--", host.address]
    try:
        env = tool_environment(os.environ, "ssh")
        done = subprocess.run(
            argv, env=env, input="", capture_output=True, text=True, errors="replace", timeout=CONFIG_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(f"cannot read {_CONFIG}, because ssh is not here: install the OpenSSH client") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{_CONFIG}: ssh did not read it within {CONFIG_S:g} s (a Match with exec?)") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith(("debug1: ", "OpenSSH_"))]
        raise ConfigError(f"{_CONFIG}: {(lines or ['it cannot be read'])[0]}")
    for key, _, value in (line.partition(" ") for line in done.stdout.splitlines()):
        settings[key] = f"{settings[key]}\n{value}" if key in settings else value
    for key in _KNOWN_HOSTS:  # ssh -G prints paths without quotes, in the home folder of the system
        paths = [Path(path) for path in re.split(" (?=/)", settings.get(key, "none")) if path != "none"]
        at_home = [home / path.relative_to(own) if path.is_relative_to(own) else path for path in paths]
        settings[key] = "\n".join(map(str, at_home))
    settings[_FILES] = "\n".join(re.findall(r"(?m)^debug1: Reading configuration data (.*)$", done.stderr))
    return settings


def _sharers(host: Host, settings: Mapping[str, str]) -> Callable[[Host], bool]:
    """Return a predicate that tells whether another host has the same settings as ``host``, apart from the name.

    With this predicate, one run of ``ssh -G`` is enough for many hosts.
    """
    text = "\n".join(Path(path).read_text(errors="replace") for path in settings[_FILES].splitlines()).lower()
    lines = [re.sub('[="]', " ", line).split() for line in text.splitlines() if not line.strip().startswith("#")]
    given = [setting for setting in lines if setting]
    patterns = {pattern.removeprefix("!") for key, *setting in given if key == "host" for pattern in setting}
    depends = settings["hostname"] != host.address or any(
        key in ("match", "canonicalizehostname")
        or (key == "hostname" and host.address in setting)
        or (key not in _EXPANDED_HERE and "%" in "".join(setting))
        for key, *setting in given
    )
    return lambda other: (
        not depends
        and re.fullmatch(_UNCHANGED, other.address) is not None
        and replace(other, address=host.address) == host
        and all(_matches(other.address, pattern) == _matches(host.address, pattern) for pattern in patterns)
    )


def _login_flags(host: Host) -> list[str]:
    return [word for flag, value in (("-l", host.user), ("-p", host.port)) if value for word in (flag, str(value))]


def config_of(home: Path) -> list[str]:
    """Return options for OpenSSH.

    If ``home`` is not the user's home folder, the options name the configuration in ``home``.
    """
    if home == _own_home(home):
        return []
    config = home / ".ssh" / "config"
    return ["-F", str(config) if config.is_file() else "none"]


def _own_home(home: Path) -> Path:
    with suppress(KeyError):  # the user is unknown; OpenSSH reports this
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    return home


@dataclass(frozen=True, kw_only=True)
class KnownKeys:
    """The keys of one host in known_hosts."""

    keys: tuple[PKey, ...]
    revoked: tuple[PKey, ...]


def known_keys(files: Iterable[Path], name: str) -> KnownKeys:
    """Return the keys of the host that known_hosts calls ``name``, such as ``box1`` or ``[box1]:2222``.

    Host certificates are skipped, because paramiko does not support them.
    """
    keys: list[PKey] = []
    revoked: list[PKey] = []
    for path in files:
        if not path.is_file() or not os.access(path, os.R_OK):
            continue  # most of the files do not exist
        for line in path.read_text(errors="replace").splitlines():
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if marker not in ("", "@revoked") or line.startswith("#") or len(fields) < 3:
                continue
            with suppress(SSHException, InvalidHostKey):
                if _is_named(name.lower(), fields[0]) and (entry := HostKeyEntry.from_line(" ".join(fields))):
                    (revoked if marker else keys).append(entry.key)
    return KnownKeys(keys=tuple(keys), revoked=tuple(revoked))


def _is_named(name: str, patterns: str) -> bool:
    """Return whether ``patterns``, the first word of a line in known_hosts, match the host ``name``."""
    if patterns.startswith("|1|"):
        salt, _, digest = patterns[3:].partition("|")
        with suppress(ValueError):  # it is not base64
            return hmac.digest(b64decode(salt), name.encode(), "sha1") == b64decode(digest)
    matching = [pattern for pattern in patterns.lower().split(",") if _matches(name, pattern.removeprefix("!"))]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``name`` matches an OpenSSH pattern, in which only ``*`` and ``?`` are wildcards."""
    return name == pattern or (not {*"*?"}.isdisjoint(pattern) and fnmatchcase(name, pattern.replace("[", "[[]")))


# Connections


logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its errors are raised as exceptions


class NoConnectionError(Exception):
    """A connection failed. The message is one sentence, which does not contain the host."""


class _HostKeyError(SSHException):  # type: ignore[misc]  # paramiko has no types
    """A host key is not accepted."""


class _SecondFactorError(AuthenticationException):  # type: ignore[misc]
    """The host has accepted a key, and asks for a password or a code as well."""


class _KeysOnly(Transport):  # type: ignore[misc]
    """A transport that never asks the user for anything."""

    def auth_interactive_dumb(self, *_: object) -> None:
        """Refuse a second factor. paramiko would write a prompt to stdout and read stdin."""
        raise _SecondFactorError


@dataclass(frozen=True, kw_only=True)
class _Strict(MissingHostKeyPolicy):  # type: ignore[misc]
    """Rejects each host key that the client does not know."""

    host: str  # as a user would type it
    known: KnownKeys
    keeps_keys: bool  # whether ssh writes accepted keys into a file

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:  # noqa: ARG002
        raise _HostKeyError(_refusal(self.host, hostname, self.known, key, keeps_keys=self.keeps_keys))


def _refusal(host: str, name: str, known: KnownKeys, key: PKey, *, keeps_keys: bool = True) -> str:
    shown = f"{_kind(key)} {key.fingerprint}"
    if key in known.revoked:
        return f"its host key {shown} is revoked in known_hosts: do not connect to it"
    if not known.keys and not keeps_keys:
        return (
            f"its host key {shown} is not known, and ~/.ssh/config keeps no keys of this host (UserKnownHostsFile "
            f"/dev/null): name a file there, compare the key on the machine itself, then trust it with: ssh {host}"
        )
    if not known.keys:
        return (
            f"its host key {shown} is not in known_hosts: compare it on the machine itself "
            f"(ssh-keygen -lf /etc/ssh/ssh_host_{_kind(key).lower()}_key.pub), then trust it with: ssh {host}"
        )
    had = ", ".join(f"{_kind(other)} {other.fingerprint}" for other in known.keys)
    return (
        f"its host key has CHANGED (known_hosts has {had}, the host shows {shown}): the machine was reinstalled, or "
        "somebody intercepts the connection. If the machine was reinstalled, run "
        f"ssh-keygen -R {shlex.quote(name)}, then ssh {host}"
    )


def _kind(key: PKey) -> str:
    return str(key.get_name()).removeprefix("ssh-").split("-")[0].upper()


@dataclass(frozen=True, kw_only=True)
class _Hop:
    connection: Connection
    host: Host
    known_name: str  # its name in known_hosts
    before: "_Hop | None"


@dataclass
class Connector:
    """Opens connections with the SSH configuration of one home folder."""

    home: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _shared: tuple[dict[str, str], Callable[[Host], bool]] | None = None

    def openssh(self, host: Host) -> list[str]:
        """Return a command line for OpenSSH's client. It has the same settings as a connection from ``open``.

        Raises ConfigError.
        """
        settings = self._settings(host)
        known = " ".join(f'"{path}"' for path in settings["userknownhostsfile"].splitlines())
        pairs = f"ConnectTimeout={CONNECT_S:.0f} {_OPTIONS}".split()
        options = [word for option in (*pairs, f"UserKnownHostsFile={known or 'none'}") for word in ("-o", option)]
        options += [word for key in self.keys_of(settings, host) for word in ("-i", key)]
        return ["ssh", "-T", *config_of(self.home), *options, *_login_flags(host)]

    def _settings(self, host: Host) -> dict[str, str]:
        """Return the settings of a host. Hosts with the same configuration share the result of ``ssh -G``."""
        with self._lock:
            if self._shared is None:
                self._shared = {}, lambda _: False  # used if the configuration cannot be read
                settings = read_settings(host, self.home)
                with suppress(OSError):
                    self._shared = settings, _sharers(host, settings)
                return settings
            settings, same = self._shared
        return {**settings, "hostname": host.address} if same(host) else read_settings(host, self.home)

    def open(self, host: Host) -> Connection:
        """Open a connection to a host. Raises NoConnectionError, ConfigError."""
        hop = self._prepare(host, ())
        try:
            _open(hop)
        except NoConnectionError:
            hop.connection.close()
            raise
        return hop.connection

    def _prepare(self, host: Host, inner: tuple[str, ...]) -> _Hop:
        """Return unopened connections to a host and its jump hosts. Raises NoConnectionError, ConfigError."""
        if host.address in inner or len(inner) > MAX_HOPS:
            raise NoConnectionError(f"its ProxyJump leads in a circle: {' -> '.join((*inner, host.address))}")
        settings = self._settings(host)
        before = self._jumps(settings, (*inner, host.address))
        connection = Connection(
            settings["hostname"],
            user=settings["user"],
            port=int(settings["port"]),
            config=Config(ssh_config=SSHConfig(), lazy=True),  # OpenSSH has read the real configuration
            gateway=before.connection if before else self._expand(settings.get("proxycommand", ""), host, settings),
            forward_agent=False,
            connect_timeout=int(CONNECT_S),
        )
        connection.connect_kwargs = {
            "key_filename": self.keys_of(settings, host),
            "allow_agent": settings.get("identitiesonly") != "yes",
            "look_for_keys": False,
            "banner_timeout": CONNECT_S,
            "auth_timeout": CONNECT_S,
            "transport_factory": _KeysOnly,
        }
        return _Hop(connection=connection, host=host, known_name=self._trust(connection, settings, host), before=before)

    def keys_of(self, settings: Mapping[str, str], host: Host) -> list[str]:
        """Return the paths of the private keys for a host."""
        if host.key:
            return [str(Path(host.key).expanduser())]
        named = settings.get("identityfile", "").splitlines()
        return [path for path in (self._expand(path, host, settings) for path in named) if Path(path).is_file()]

    def _expand(self, text: str, host: Host, settings: Mapping[str, str]) -> str:
        """Replace ``~``, environment variables and the tokens of ssh_config(5) in a value."""
        values = {
            "%": "%",
            "d": str(self.home),
            "h": settings["hostname"],
            "n": host.address,
            "p": settings["port"],
            "r": settings["user"],
            "u": getpass.getuser(),
        }
        text = os.path.expanduser(re.sub(r"^~(?=/)", lambda _: str(self.home), text))  # noqa: PTH111 -- of any text
        text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)
        return re.sub(r"%(.)", lambda match: values.get(match[1], match[0]), text)

    def _jumps(self, settings: Mapping[str, str], inner: tuple[str, ...]) -> _Hop | None:
        """Return the last jump host of a host, or None. Its connection goes through the earlier jump hosts."""
        before: _Hop | None = None
        for jump in filter(None, settings.get("proxyjump", "").split(",")):
            user, _, place = jump.strip().removeprefix("ssh://").rpartition("@")
            address, port = _split(place)
            if address == inner[-1]:  # the jump host itself, to which a ProxyJump under `Host *` also applies
                return before
            hop = self._prepare(Host(address=address, user=user or None, port=port), inner)
            if before is not None:
                hop.connection.gateway = before.connection
                hop = replace(hop, before=before)
            before = hop
        return before

    def _trust(self, connection: Connection, settings: Mapping[str, str], host: Host) -> str:
        """Make the connection accept only the host's keys in known_hosts. Return the host's name in known_hosts."""
        shown = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
        name = settings.get("hostkeyalias", shown)
        known = known_keys((Path(line) for key in _KNOWN_HOSTS for line in settings[key].splitlines()), name)
        for key in known.keys:
            if key not in known.revoked:
                connection.client.get_host_keys().add(shown, key.get_name(), key)
        keeps_keys = settings["userknownhostsfile"] not in ("", os.devnull)
        policy = _Strict(host=_typed(host), known=known, keeps_keys=keeps_keys)
        connection.client.set_missing_host_key_policy(policy)
        return name


def _open(hop: _Hop) -> None:
    if hop.before is not None:
        try:
            _open(hop.before)
        except NoConnectionError as error:
            raise NoConnectionError(f"its jump host {hop.before.host}: {error}") from None
    try:
        hop.connection.open()
    except (SSHException, OSError, EOFError) as error:
        raise NoConnectionError(one_line(_why(error, hop))) from None


def _split(place: str) -> tuple[str, int | None]:
    address, colon, port = place.rpartition(":")
    if not colon or not port.isdecimal() or (":" in address and not address.endswith("]")):
        return place.strip("[]"), None
    return address.strip("[]"), int(port)


def _typed(host: Host) -> str:
    login = f"{host.user}@{host.address}" if host.user else host.address
    return shlex.join([*(("-p", str(host.port)) if host.port else ()), login])


def _why(error: Exception, hop: _Hop) -> str:
    connection, host = hop.connection, hop.host
    place, transport = f"{connection.host}:{connection.port}", connection.client.get_transport()
    match error:
        case BadHostKeyException():
            return _refusal(_typed(host), hop.known_name, KnownKeys(keys=(error.expected_key,), revoked=()), error.key)
        case _HostKeyError():
            return str(error)
        case PasswordRequiredException():
            return "its key is encrypted and no agent has it: ssh-add it first"
        case _SecondFactorError():
            return (
                f"it accepts the key of {connection.user}, but also asks for a password or a code, which ddpctl cannot "
                "give: the key must be enough there (AuthenticationMethods in sshd_config), or run ddpctl there. "
                "A connection that your ssh shares (ControlMaster) is not used"
            )
        case SSHException() if isinstance(error, AuthenticationException) or "authentication methods" in str(error):
            return _refused_keys(hop)
        case ChannelException():
            return f"it cannot be reached from its jump host as {place}: {error.text.lower()}"
        case SSHException() if transport and transport.initial_kex_done:
            keys = ", ".join(connection.connect_kwargs["key_filename"])
            problem = f"it cannot log in with a key ({keys}: {str(error).lower()})"
            return f"{problem}: if the key has another format, convert it with ssh-keygen -p -f KEY"
        case SSHException() if transport and transport.is_active():  # paramiko does not say that its time is up
            return f"{place} has not agreed on session keys within {CONNECT_S:g} s: it or this machine is too busy"
        case SSHException():
            return f"{place} does not answer like an SSH server ({str(error).lower()}): check the port"
    return _why_not_there(error, connection.host, place)


def _why_not_there(error: Exception, host: str, place: str) -> str:
    match error:
        case socket.gaierror():
            return f"'{host}' does not resolve: {(error.strerror or str(error)).lower()}"
        case TimeoutError():
            return f"{place} does not answer within {CONNECT_S:g} s: it is down, or a firewall blocks the connection"
        case NoValidConnectionsError():
            reasons = {(inner.strerror or str(inner)).lower() for inner in error.errors.values()}
            return f"{place} cannot be reached ({', '.join(sorted(reasons))}): is sshd running there?"
        case FileNotFoundError():
            return f"its key {error.filename} does not exist"
    return f"{place}: {str(error) or type(error).__name__}"


def _refused_keys(hop: _Hop) -> str:
    tried = ", ".join(hop.connection.connect_kwargs["key_filename"])
    keys = f"the agent's and {tried}" if tried else "the agent's; ~/.ssh has none"
    return (
        f"it accepts no key of {hop.connection.user} ({keys}): put one there with "
        f"ssh-copy-id {_typed(hop.host)}, or name the right one as key"
    )
