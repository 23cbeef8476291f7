"""``python -m ddpctl``."""

from ddpctl.main import main

main()
