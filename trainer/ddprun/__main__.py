"""``ddprun`` and ``python -m ddprun``."""

import signal

for number in (signal.SIGUSR1, signal.SIGUSR2):  # they never kill ddprun, not even while it is being imported
    signal.signal(number, signal.SIG_IGN)

from ddprun.main import main  # noqa: E402

if __name__ == "__main__":
    main()
