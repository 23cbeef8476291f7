"""Opens SSH connections: agent and keys, jump hosts, and on every hop a host key that known_hosts has, or none.

Fabric keeps the person's configuration and the connection; by itself it accepts unknown and changed host keys.
It knows nothing of commands. Whatever goes wrong is one sentence: ``NoConnectionError``.
"""

import logging
import shlex
import socket
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fabric import Config, Connection
from paramiko import MissingHostKeyPolicy, PKey, SSHClient, SSHConfig
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    NoValidConnectionsError,
    PasswordRequiredException,
    SSHException,
)

from ddpctl.command import Host
from ddpctl.ssh_config import KnownKeys, known_hosts_files, known_keys, read_config
from ddpctl.words import one_line

CONNECT_S = 6.0  # TCP, the banner, and the log-in: each of them
MAX_HOPS = 8
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what it has to say comes as an exception


class NoConnectionError(Exception):
    """Why a host cannot be used, as one sentence that does not name the host."""


class _HostKeyError(SSHException):  # type: ignore[misc]  # paramiko has no types
    """A host key that is not to be trusted; its text says why."""


@dataclass(frozen=True, kw_only=True)
class _Strict(MissingHostKeyPolicy):  # type: ignore[misc]
    """Asked about every host key that is not among those that the client was given."""

    host: str  # as a person would type it
    known: KnownKeys

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:  # noqa: ARG002
        """Refuse it. Raises _HostKeyError."""
        raise _HostKeyError(_refusal(self.host, hostname, self.known, key))


def _refusal(host: str, name: str, known: KnownKeys, key: PKey) -> str:
    shown = f"{_kind(key)} {key.fingerprint}"
    if key in known.revoked:
        return f"its host key {shown} is revoked in known_hosts: do not connect to it"
    if not known.keys:
        return (
            f"its host key {shown} is not in known_hosts: compare it on the machine itself "
            f"(ssh-keygen -lf /etc/ssh/ssh_host_{_kind(key).lower()}_key.pub), then trust it with: ssh {host}"
        )
    had = ", ".join(f"{_kind(other)} {other.fingerprint}" for other in known.keys)
    return (
        f"its host key has CHANGED: known_hosts has {had}, it shows {shown}: the machine was set up anew, or somebody "
        f"is in between; if you know that it was set up anew: ssh-keygen -R {shlex.quote(name)}, then ssh {host}"
    )


def _kind(key: PKey) -> str:
    return str(key.get_name()).removeprefix("ssh-").split("-")[0].upper()


@dataclass(frozen=True, kw_only=True)
class _Hop:
    """A connection that is not up yet, and the hop before it."""

    connection: Connection
    host: Host
    known_name: str  # what known_hosts calls it
    before: "_Hop | None"


@dataclass
class Connector:
    """Opens connections for one person."""

    home: Path
    _config: SSHConfig | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, host: Host) -> Connection:
        """A connection that is up. Raises NoConnectionError, ConfigError."""
        with self._lock:
            self._config = self._config or read_config(self.home)
        hop = self._prepare(host, ())
        try:
            _open(hop)
        except NoConnectionError:
            hop.connection.close()
            raise
        return hop.connection

    def _prepare(self, host: Host, inner: tuple[str, ...]) -> _Hop:
        """A connection that is not up yet, with those of its jump hosts. Raises NoConnectionError."""
        if host.address in inner or len(inner) > MAX_HOPS:
            raise NoConnectionError(f"its ProxyJump leads in a circle: {' -> '.join((*inner, host.address))}")
        config = Config(ssh_config=self._config, lazy=True)
        said = config.base_ssh_config.lookup(host.address)
        before = self._jumps(said, (*inner, host.address))
        connection = Connection(
            host.address,
            user=host.user,
            port=host.port,
            config=config,
            gateway=before.connection if before else said.get("proxycommand") or False,
            forward_agent=False,
            connect_timeout=int(CONNECT_S),
        )
        paths = [Path(host.key)] if host.key else [Path(key) for key in said.get("identityfile", ())]
        paths = paths or [self.home / ".ssh" / name for name in DEFAULT_KEYS]
        connection.connect_kwargs = {
            "key_filename": [str(path.expanduser()) for path in paths if host.key or path.expanduser().is_file()],
            "allow_agent": said.get("identitiesonly", "no").lower() != "yes",
            "look_for_keys": False,
            "banner_timeout": CONNECT_S,
            "auth_timeout": CONNECT_S,
        }
        return _Hop(connection=connection, host=host, known_name=self._trust(connection, said, host), before=before)

    def _jumps(self, said: dict[str, Any], inner: tuple[str, ...]) -> _Hop | None:
        """The last of a host's jump hosts, with those before it."""
        before: _Hop | None = None
        jumps = said.get("proxyjump", "none")
        for jump in jumps.split(",") if jumps.lower() != "none" else ():
            user, _, place = jump.strip().removeprefix("ssh://").rpartition("@")
            address, port = _split(place)
            if address == inner[-1]:  # `Host *` with a ProxyJump that the jump host itself need not take
                return before
            hop = self._prepare(Host(address=address, user=user or None, port=port), inner)
            if before is not None:
                hop.connection.gateway = before.connection
                hop = replace(hop, before=before)
            before = hop
        return before

    def _trust(self, connection: Connection, said: dict[str, Any], host: Host) -> str:
        """Give the client the keys that known_hosts has for this host, and no other; its name in known_hosts."""
        shown = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
        name = said.get("hostkeyalias", shown)
        known = known_keys(known_hosts_files(said, self.home), name)
        for key in known.keys:
            if key not in known.revoked:
                connection.client.get_host_keys().add(shown, key.get_name(), key)
        connection.client.set_missing_host_key_policy(_Strict(host=_typed(host), known=known))
        return str(name)


def _open(hop: _Hop) -> None:
    """Open it and all before it. Raises NoConnectionError, which says so where it is a jump host's."""
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
    """``box1:2222``, ``[::1]:22`` or ``box1``."""
    address, colon, port = place.rpartition(":")
    if not colon or not port.isdecimal() or (":" in address and not address.endswith("]")):
        return place.strip("[]"), None
    return address.strip("[]"), int(port)


def _login(host: Host) -> str:
    return f"{host.user}@{host.address}" if host.user else host.address


def _typed(host: Host) -> str:
    return shlex.join([*(("-p", str(host.port)) if host.port else ()), _login(host)])


def _why(error: Exception, hop: _Hop) -> str:
    """The sentence for what went wrong on the way to a host."""
    connection, host = hop.connection, hop.host
    place = f"{connection.host}:{connection.port}"
    match error:
        case BadHostKeyException():
            known = KnownKeys(keys=(error.expected_key,), revoked=())
            return _refusal(_typed(host), hop.known_name, known, error.key)
        case _HostKeyError():
            return str(error)
        case PasswordRequiredException():
            return "its key is encrypted and no agent has it: ssh-add it first"
        case AuthenticationException() | SSHException() if _is_about_keys(error):
            return _refused_keys(hop)
        case ChannelException():
            return f"it cannot be reached from its jump host as {place}: {error.text.lower()}"
        case SSHException():
            return f"{place}: {str(error).lower()}: is it an SSH server?"
    return _why_not_there(error, connection.host, place)


def _is_about_keys(error: Exception) -> bool:
    return isinstance(error, AuthenticationException) or "authentication methods" in str(error)


def _why_not_there(error: Exception, host: str, place: str) -> str:
    """The sentence for a host that was not spoken to at all."""
    match error:
        case socket.gaierror():
            return f"{host} does not resolve: {(error.strerror or str(error)).lower()}"
        case TimeoutError():
            return f"{place} does not answer within {CONNECT_S:g} s: it is down, or a firewall is in between"
        case NoValidConnectionsError():
            reasons = {(inner.strerror or str(inner)).lower() for inner in error.errors.values()}
            return f"{place}: {', '.join(sorted(reasons))}: is sshd running there?"
        case FileNotFoundError():
            return f"its key {error.filename} is not there"
    return f"{place}: {str(error) or type(error).__name__}"


def _refused_keys(hop: _Hop) -> str:
    tried = ", ".join(hop.connection.connect_kwargs["key_filename"])
    keys = f"the agent's and {tried}" if tried else "the agent's, and there is none in ~/.ssh"
    return (
        f"it refuses every key of {hop.connection.user} ({keys}): put one there with "
        f"ssh-copy-id {_typed(hop.host)}, or name the right one as key"
    )
