"""``--debug``: what torch offers to find out why ranks disagree, hang or compute nonsense. It costs speed."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

RECORDS = 2000  # the last collectives that the flight recorder keeps


def set_up(folder: Path = Path()) -> None:
    """Turn it on, before the ranks meet. What the user's environment says holds."""
    given = {
        # Not DETAIL: with it DistributedDataParallel over a gloo group ends in SIGSEGV (torch 2.15, without ddptrain).
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_FR_BUFFER_SIZE": str(RECORDS),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "flight-recorder-"),  # NCCL adds the rank
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "WARN",
    }
    for name, value in given.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch may have been imported long before
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # a nan is the guard's: this tells where it came from


def dump_collectives(rank: int, folder: Path, *, say: Callable[[str], None]) -> None:
    """Write the last collectives of this rank. gloo, unlike NCCL, never does so by itself."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json
    except ImportError:  # a private name
        return
    path = folder / f"flight-recorder-{rank}.json"
    try:
        trace = _dump_fr_trace_json()
        path.write_bytes(trace if isinstance(trace, bytes) else trace.encode())
    except (OSError, RuntimeError) as error:
        say(f"rank {rank}: no record of its collectives: {error}")
        return
    say(f"rank {rank}: its last collectives are in {path}")
