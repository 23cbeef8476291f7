"""Another name for `ddpwire.client`, for scripts to import: ``import ddpwire.script as ddp``."""

import sys

from ddpwire import client

sys.modules[__name__] = client
