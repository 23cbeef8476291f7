"""A rank without torch that beats: --steps N of --pause S each, from where the run's progress file says.

--fail ATTEMPT.RANK=DEED@STEP (many; ATTEMPT or RANK may be *): at that step exit with DEED, die of signal -DEED,
or sleep for ever ('sleep'), after a dump ('dump'), eat memory ('eat'). --mute: no heartbeat.
--tell: report each checkpoint.
"""

import argparse
import os
import signal
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from ddpwire.events import events_of
from ddpwire.heartbeat import HEARTBEAT_FILE, Heart

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--fail", action="append", default=[])
parser.add_argument("--mute", action="store_true")
parser.add_argument("--tell", action="store_true")
args = parser.parse_args()
rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "DDP_ATTEMPT"))
folder = Path(os.environ["DDP_RUN_DIR"], "steps")
folder.mkdir(exist_ok=True)
heart = Heart(None if args.mute else os.environ[HEARTBEAT_FILE])
done = folder / "checkpoint"
first = int(done.read_text()) + 1 if done.exists() else 0


def fail(deed):
    if deed == "dump":
        Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}").write_text(f"attempt {attempt}")
    if deed in ("dump", "sleep"):
        time.sleep(1000)
    elif deed == "eat":
        eaten = []
        while True:
            eaten.append(os.urandom(1 << 22) * 4)
    elif int(deed) < 0:
        os.kill(os.getpid(), -int(deed))
        signal.pause()
    else:
        sys.exit(int(deed))


print(f"attempt {attempt}: rank {rank} of {world} from step {first}")
for step in range(first, args.steps):
    for word in args.fail:
        where, _, what = word.partition("=")
        deed, _, at = what.partition("@")
        if fnmatch(f"{attempt}.{rank}", where) and int(at) == step:
            fail(deed)
    (folder / f"{attempt}.{step}.{rank}").touch()
    while not all((folder / f"{attempt}.{step}.{other}").exists() for other in range(world)):  # as an all-reduce does
        time.sleep(0.002)
    time.sleep(args.pause)
    if rank == 0 and step % 5 == 4:
        done.with_suffix(".new").write_text(str(step))
        done.with_suffix(".new").replace(done)
        if args.tell:
            events_of(os.environ).emit("checkpoint_saved", step=step)
    heart.beat(step)
