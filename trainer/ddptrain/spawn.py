"""Ranks of one machine, started with torch.multiprocessing: what ``--spawn N`` means, and how a notebook starts them.

The ranks meet in a file, so that no port is needed. This process passes signals on to them and waits.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ddpwire import names
from ddpwire.exits import Exit, of_status

GRACE_S = 30.0  # for the other ranks, once one has failed; what they wait for the failed one is cut short by it
POLL_S = 0.05
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def spawn(arguments: Sequence[str], num_ranks: int) -> int:
    """Train on so many processes with a command line of ddptrain; the code of the rank that failed first."""
    from torch.multiprocessing.spawn import start_processes  # imports torch

    processes: list[BaseProcess] = []
    signal.set_wakeup_fd(-1)  # a rank's handlers, which this process is not

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.pid and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means what it says
            signal.signal(number, pass_on)
    with tempfile.TemporaryDirectory(prefix="ddptrain-") as folder:
        meet = f"file://{Path(folder, 'meet')}"
        context = start_processes(  # type: ignore[no-untyped-call]
            run_rank,
            args=(num_ranks, meet, tuple(arguments), os.getpid()),
            nprocs=num_ranks,
            join=False,
            start_method="spawn",
        )
        processes += context.processes
        return _wait(processes)


def run_rank(rank: int, num_ranks: int, meet: str, arguments: tuple[str, ...], parent: int) -> None:
    """One rank, in a process of its own that starts here. torch has it end with its parent from here on."""
    if os.getppid() != parent:  # which was killed meanwhile: nobody would ever tell this one
        os._exit(Exit.KILLED)
    here = {names.RANK: rank, names.LOCAL_RANK: rank, names.WORLD_SIZE: num_ranks, names.LOCAL_WORLD_SIZE: num_ranks}
    os.environ.update({name: str(value) for name, value in here.items()})
    sys.argv[1:] = [*arguments, "--spawn=1", f"--init-method={meet}"]
    from ddptrain.__main__ import main

    main()


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank: then it spawns none."""
    return names.RANK in environ


def _wait(processes: Sequence[BaseProcess]) -> int:
    """Until all have ended. The first code that is not 0."""
    first, failed_at = int(Exit.OK), 0.0
    while any(process.exitcode is None for process in processes):
        time.sleep(POLL_S)
        if first and time.monotonic() - failed_at > GRACE_S:
            for process in processes:
                process.kill()
        if not first and (first := _worst(processes)):
            failed_at = time.monotonic()
    return first or _worst(processes)


def _worst(processes: Sequence[BaseProcess]) -> int:
    """The code of the lowest rank that has failed; 0: none has."""
    return next((of_status(process.exitcode) for process in processes if process.exitcode), 0)
