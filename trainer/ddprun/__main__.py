"""``ddprun`` and ``python -m ddprun``."""

from ddprun.main import main

if __name__ == "__main__":
    main()
