"""The entry point of ``ddprun`` and ``python -m ddprun``."""

import os
import signal
import sys

for number in (signal.SIGUSR1, signal.SIGUSR2):  # these signals must never kill ddprun, not even during its imports
    signal.signal(number, signal.SIG_IGN)

from ddpwire import job_env, names  # noqa: E402
from ddpwire.exits import Exit  # noqa: E402
from ddpwire.streams import open_closed  # noqa: E402

open_closed()  # before the first socket
if names.JOB_ENV in os.environ:  # Python, its libraries and its memory allocator read variables when they start
    try:
        environ = job_env.unpack(os.environ)
    except ValueError as error:
        print(f"ddprun: {error}", file=sys.stderr)
        sys.exit(Exit.CONFIG)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)  # noqa: S606 (itself)

from ddprun.main import main  # noqa: E402

if __name__ == "__main__":
    main()
