"""Another name of `ddpwire.client`: ``import ddpwire.script as ddp`` is what scripts write."""

import sys

from ddpwire import client

sys.modules[__name__] = client
