"""``--spawn N``: start N ranks on this machine with torch.multiprocessing, forward signals to them, and wait.

The ranks meet through a file, so they need no port.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ddprank.signals import STOPS
from ddpwire import names
from ddpwire.exits import Exit, of_status

GRACE_S = 15.0  # time for the other ranks to exit after one has failed, and then again after SIGTERM


def spawn(arguments: Sequence[str], num_ranks: int) -> int:
    """Start ``num_ranks`` processes with ddptrain's command line. Return the first exit code that is not 0, else 0."""
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes  # imports torch

    processes: list[BaseProcess] = []
    signal.set_wakeup_fd(-1)  # turns off the signal handling of a rank, because this process is not a rank

    def forward(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.pid and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored: started with nohup
            signal.signal(number, forward)
    with tempfile.TemporaryDirectory(prefix="ddptrain-") as folder:
        init_method = f"file://{Path(folder, 'meet')}"
        context = start_processes(  # type: ignore[no-untyped-call]
            run_rank,
            args=(num_ranks, init_method, tuple(arguments), os.getpid()),
            nprocs=num_ranks,
            join=False,
            start_method="spawn",
        )
        processes += context.processes
        try:
            while not context.join(grace_period=GRACE_S):
                pass
        except ProcessExitedException as error:
            return of_status(error.exit_code)
        return Exit.OK


def run_rank(rank: int, num_ranks: int, init_method: str, arguments: tuple[str, ...], parent: int) -> None:
    """Run one rank in its own process. torch ends this process when its parent ends."""
    if os.getppid() != parent:  # the parent was killed before torch could watch it
        os._exit(Exit.KILLED)
    os.environ |= dict.fromkeys((names.RANK, names.LOCAL_RANK), str(rank))
    os.environ |= dict.fromkeys((names.WORLD_SIZE, names.LOCAL_WORLD_SIZE), str(num_ranks))
    sys.argv[1:] = [*arguments, "--spawn=1", f"--init-method={init_method}"]
    import_module("ddptrain.__main__").main()  # imported by name, because it imports this module
