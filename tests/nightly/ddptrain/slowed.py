"""Run on each rank: ddptrain, on ranks that sleep for each of their samples.

slowed.py SECONDS,... OPTIONS...: the first argument has the time that each rank sleeps for a sample.
"""

import os
import sys
import time

from ddprank.signals import Signals
from ddptrain import train_loop
from ddptrain.config import parse_options
from ddptrain.main import run

sleep_s = float(sys.argv[1].split(",")[int(os.environ["RANK"])])
compute_gradients = train_loop.compute_gradients


def slow_gradients(state, batch, shard, **how):
    time.sleep(sleep_s * shard.num_samples)
    how["phases"].mark("forward")
    return compute_gradients(state, batch, shard, **how)


train_loop.compute_gradients = slow_gradients
code = run(parse_options(sys.argv[2:], os.environ), os.environ, Signals(), started=time.monotonic())
sys.stdout.flush()
os._exit(code)
