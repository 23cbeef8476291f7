"""The process groups of a forked rank: whether it creates one, and whether two processes claim the same rank.

If a script starts its own ranks, it does so in every rank. Then two processes claim the same place (URL, rank and world
size), and neither process group ever forms. So the second process that claims a place gets an error. This is checked in
forked ranks (fork_server.py), and in processes that they fork or start with torch.multiprocessing.spawn. Ranks that are
executed are watched by heartbeat_monitor.py.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, urlsplit, urlunsplit

from ddprank.heartbeat import HEARTBEAT_FILE
from ddprun.ranks.rank_server import serve
from ddprun.system import compat
from ddpwire import names
from ddpwire.run_files import GROUP_SUFFIX

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" means that the agent serves the store, and no rank does
OWN_STORE = "DDP_SCRIPT_STORE"  # set if ddprun changed the variable above, because the script chose its own address
RUN_ID = "TORCHELASTIC_RUN_ID"
GUIDE = "docs/script.md"
AS_ONE_RANK = f"run the script as one rank (ddpctl launch --ranks 1, ddprun --nproc-per-node 1); see {GUIDE}"


class DebugStore:
    """A finder in sys.meta_path that serves a single rank's store before torch.distributed.debug connects to it.

    torch.distributed lets the process group, which would serve this store, share it later.
    """

    _store: object = None

    def find_spec(self, name: str, *_: Any) -> None:
        """Return None, so that Python asks the other finders."""
        if name == "torch.distributed.debug" and not self._store:
            where = os.environ[names.MASTER_ADDR], int(os.environ[names.MASTER_PORT]), 1, True
            self._store = sys.modules["torch.distributed"].TCPStore(*where, wait_for_workers=False, multi_tenant=True)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank, and the store that ddprun serves for it. Processes that the rank starts use the same values."""

    rank: str
    pid: int  # the rank's own
    store_port: str
    run_id: str  # torch elastic's; if the script starts an agent itself, that agent has another id
    claims: Path  # a folder of this node and attempt, with a link for each place that a process has claimed
    attempt: int
    own_groups: list[str] = field(default_factory=list)  # the rank's claims in ddprun's store, one for each group

    def watch(self) -> None:
        """Check each process group before the group is created.

        This includes the groups in processes that this process starts with torch.multiprocessing.
        """
        compat.before_rendezvous(self.check)

        def change(function: Callable[..., None]) -> Callable[..., None]:
            can_import = PathFinder.find_spec("ddprun") is not None  # the script may have changed sys.path
            return functools.partial(_watch_and_call, self, function) if can_import else function

        compat.change_spawned(change)

    def check(self, url: object, rank: object, world_size: object) -> object:
        """Claim the place in a new process group, and return the URL at which its ranks meet.

        Raises RuntimeError if another rank of this node has claimed the place.
        """
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts and parts.scheme == "file" and self.attempt > 1:  # the file is full of the keys of the attempt before
            path = f"{parts.path}.{os.environ.get(names.RUN_ID)}.attempt-{self.attempt}"
            if self.rank == "0":
                print(f"ddprun: an earlier attempt has left {parts.path}: the ranks meet in {path}", file=sys.stderr)
            return urlunsplit(parts._replace(path=path))
        if parts and parts.scheme in ("env", "tcp"):
            self._claim_place(parts, rank, world_size)
        return url

    def _claim_place(self, parts: SplitResult, rank: object, world_size: object) -> None:
        environ = os.environ
        script_chooses = environ.get(USE_AGENT_STORE) != "True" and OWN_STORE not in environ  # who serves the store
        if script_chooses or environ.get(RUN_ID) != self.run_id:
            return
        address = parts.netloc or f"{environ.get(names.MASTER_ADDR)}:{environ.get(names.MASTER_PORT)}"
        place, size = (
            parse_qs(parts.query).get(key, [environ.get(variable, "") if given in (-1, None) else str(given)])[0]
            for key, given, variable in (("rank", rank, names.RANK), ("world_size", world_size, names.WORLD_SIZE))
        )
        is_own_store = address.rpartition(":")[2] != self.store_port
        claim = f"{place} of {size} at {address}"
        if not is_own_store and os.getpid() == self.pid and size != "1":
            claim += f" in group {len(self.own_groups)}"  # ranks may exchange their places in a later group
            self.own_groups.append(claim)
        # In ddprun's store, groups of size 1 do not conflict.
        if (is_own_store or size != "1") and (other := self._claim(claim)):
            first, second = sorted((self.rank, other), key=int)
            ranks, where = f"ranks {first} and {second}", f"rank {place} of {size} at {address}"
            if os.getpid() == self.pid:
                advice = f"leave out rank and world_size, which the environment sets; see {GUIDE}"
                raise RuntimeError(f"{ranks} both call init_process_group as {where}: {advice}")
            cause = f"{ranks} each run a script that starts ranks itself"
            raise RuntimeError(f"two processes call init_process_group as {where}, because {cause}: {AS_ONE_RANK}")
        environ[USE_AGENT_STORE] = str(not is_own_store)  # if no agent serves the store, the group's rank 0 must
        if is_own_store:
            environ[OWN_STORE] = "1"
        else:
            environ.pop(OWN_STORE, None)

    def _claim(self, place: str) -> str:
        """Claim a place. Return the other rank that has claimed it and is still alive, or an empty string."""
        link = self.claims / quote(f"group {place}", safe="")
        try:
            link.symlink_to(f"{self.rank}.{os.getpid()}")
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError):
                rank, pid = os.readlink(link).split(".")  # noqa: PTH115 (it leads nowhere)
                if rank != self.rank and Path(f"/proc/{pid}").exists():
                    return rank
        except OSError:  # the disk is full, or the folder is gone: claims are unknown
            pass
        return ""


def _watch_and_call(place: RankPlace, function: Callable[..., None], *args: Any) -> None:
    """Call the function that a rank passes to torch.multiprocessing.spawn, and check its process groups."""
    place.watch()
    function(*args)


def watch_process_groups(env: Mapping[str, str]) -> None:
    """Check the process groups of a forked rank, unless it is the only rank."""
    if env.get(names.WORLD_SIZE) == "1":
        sys.meta_path.insert(0, DebugStore())
    elif names.WORLD_SIZE in env and HEARTBEAT_FILE in env:
        RankPlace(
            rank=env[names.RANK],
            pid=os.getpid(),
            store_port=env[names.MASTER_PORT],
            run_id=env[RUN_ID],
            claims=Path(env[HEARTBEAT_FILE]).parent,
            attempt=int(env[names.ATTEMPT]),
        ).watch()


def record_process_group(env: Mapping[str, str]) -> None:
    """When the rank creates a process group, write a file beside its heartbeat and serve its flight recorder.

    A rank without a process group, such as the only one of a run, serves from its first step of an optimizer on.
    """
    path, pid = env.get(HEARTBEAT_FILE), os.getpid()

    @functools.cache
    def serve_once() -> None:
        if path and os.getpid() == pid:
            serve(Path(path))

    def record() -> None:
        with contextlib.suppress(OSError):
            Path(f"{path}{GROUP_SUFFIX}").touch()
        serve_once()

    if path and not compat.before_process_group(record):
        record()  # it cannot be observed: assume that the rank has created a group
    if path:
        compat.before_steps(lambda _: serve_once())
