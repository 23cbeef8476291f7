"""Ends in the way that its last argument names."""

import ctypes
import os
import signal
import sys
import threading

import facts


def raise_in_hook(*_: object) -> None:
    raise KeyError("in the hook")


def wait_for_stop() -> None:
    def stop(*_: object) -> None:
        print("saves", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    facts.fact("the script is ready before the signal", lambda: True)
    facts.save()
    threading.Event().wait(300)


def import_relatively() -> None:
    sys.excepthook = raise_in_hook
    from . import nothing  # noqa: F401


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(300)


def raise_from() -> None:
    try:
        {}["lr"]
    except KeyError as error:
        raise ValueError("a bad configuration") from error


WAYS = {
    "text": lambda: sys.exit("no such data"),
    "300": lambda: sys.exit(300),
    "-1": lambda: sys.exit(-1),
    "os._exit": lambda: os._exit(5),
    "raise": raise_from,
    "relative import": import_relatively,
    "interrupt": lambda: kill(signal.SIGINT),
    "segmentation fault": lambda: ctypes.string_at(0),
    "kill": lambda: kill(signal.SIGKILL),
    "wait": wait_for_stop,
}

facts.start(globals())
print("the script runs")
WAYS[sys.argv[-1]]()
