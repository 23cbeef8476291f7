"""The identity of a run besides its name: its unique id, its user and its project.

The name is not enough, because other runs may have the same name.
"""

import contextlib
import getpass
import hashlib
import socket
import uuid
from collections.abc import Mapping

from ddprun.settings.node_config import DEFAULT_RUN_ID, NodeConfig
from ddpwire import names

UID_DIGITS = 12
PROCESS_TOKEN = uuid.uuid4().hex  # of this ddprun: a run started again by hand has the same id, but another token


def make_uid(config: NodeConfig, environ: Mapping[str, str]) -> str:
    """Return the launcher's id of the run, or an id that is the same on all nodes and after each requeue.

    Before the nodes have met, they share only values from their launcher: Slurm's job id, or node 0's address. So if
    a run is started by hand again with the same name and address, it gets the same id. A single node gets a random id
    if it has no run id or no run folder.
    """
    if uid := environ.get(names.RUN_UID):
        return uid
    if config.max_nodes > 1:
        place = config.slurm_job or f"{config.master_addr}:{config.master_port}"
    elif config.run_dir is None or config.run_id == DEFAULT_RUN_ID:
        return uuid.uuid4().hex[:UID_DIGITS]
    else:
        place = f"{config.slurm_job or socket.gethostname()}:{config.run_dir}"
    return hashlib.sha256(f"{config.run_id} {place}".encode(errors="surrogateescape")).hexdigest()[:UID_DIGITS]


def owner(config: NodeConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels ``user`` and ``project``, which are empty if unknown. The user name inside a pod is ignored."""
    user = environ.get(names.USER) or environ.get("SLURM_JOB_USER") or ""
    if not user and not config.retries_network:
        with contextlib.suppress(OSError, KeyError, ImportError):
            user = getpass.getuser()
    return {"user": user, "project": environ.get(names.PROJECT) or environ.get("SLURM_JOB_ACCOUNT") or ""}
