"""``--debug``: turn on torch's tools that show why ranks disagree, hang or compute NaN. They slow the training down."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddptrain import compat

RECORDS = 2000  # collectives that the flight recorder keeps


def set_up() -> None:
    """Turn the tools on. Call this before the process group is created. The user's environment takes precedence."""
    given = {
        # Not DETAIL: with it DistributedDataParallel over a gloo group ends in SIGSEGV (torch 2.15, without ddptrain).
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_FR_BUFFER_SIZE": str(RECORDS),
        "TORCH_FR_DUMP_TEMP_FILE": "flight-recorder-",  # NCCL adds the rank
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "WARN",
    }
    for name, value in given.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch may have been imported long before
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # only tracebacks: NonFiniteGuard finds NaN


def dump_collectives(rank: int, folder: Path, *, log: Callable[[str], None]) -> None:
    """Write the last collectives of this rank to a file. Only gloo needs this. NCCL writes such files itself."""
    dump = compat.flight_recorder_dump()
    if dump is None:
        return
    path = folder / f"flight-recorder-{rank}.json"
    try:
        trace = dump()
        path.write_bytes(trace if isinstance(trace, bytes) else trace.encode())
    except (OSError, RuntimeError) as error:
        log(f"cannot write the last collectives of rank {rank}: {error}")
        return
    log(f"wrote the last collectives of rank {rank} to {path}")
