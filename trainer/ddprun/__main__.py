"""``ddprun`` and ``python -m ddprun``."""

import signal

for number in (signal.SIGUSR1, signal.SIGUSR2):  # they never kill ddprun, not even during its imports
    signal.signal(number, signal.SIG_IGN)

from ddpwire.streams import open_closed  # noqa: E402

open_closed()  # before the first socket

from ddprun.main import main  # noqa: E402

if __name__ == "__main__":
    main()
