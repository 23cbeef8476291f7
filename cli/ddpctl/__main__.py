"""``python -m ddpctl``."""

from ddpctl.entry import main

main()
