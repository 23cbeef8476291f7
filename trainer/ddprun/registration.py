"""A node that says by itself where its metrics are, in a folder that a Prometheus watches, for as long as it lives.

Where the launcher names such a folder (the target ``local`` does); who was killed is taken out by ddpctl's next look.
"""

import contextlib
from pathlib import Path

from ddprun.contract import Contract
from ddpwire.folder import write_atomic
from ddpwire.targets import Target, file_name, text


def register(contract: Contract, url: str) -> None:
    """Write the file. Raises OSError."""
    path = _path(contract)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Target(url=url, job_id=contract.run_id, node=contract.node_rank, launcher=contract.launcher)
        write_atomic(path, text([target]).encode())
        path.chmod(0o644)  # Prometheus is another user


def deregister(contract: Contract) -> None:
    """Take it away."""
    path = _path(contract)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _path(contract: Contract) -> Path | None:
    folder = contract.targets_dir
    return None if folder is None else folder / file_name(contract.run_id, contract.node_rank)
