"""Another name for `ddprank.client`, for scripts to import: ``import ddpwire.script as ddp``."""

import sys

from ddprank import client

sys.modules[__name__] = client
