#!/usr/bin/env bash
# Most people expect a running TensorBoard to show what two processes write into one folder, because after a restart of
# TensorBoard everything is there.
# What happens: the reader of a folder reads its event files in the order of their names, and never returns to a file
# once a later one exists. As soon as a second process, such as rank 1 or a restarted run whose predecessor still ends,
# has made its file, all that the first one writes is invisible, without a message, until TensorBoard is started anew.
# `tensorboard --reload_multifile=true` reads all of them; it is off by default.
# Version: tensorboard 2.21.0.
# Source: tensorboard/backend/event_processing/directory_watcher.py, and the help text of --reload_multifile.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorboard==2.21.0 protobuf==7.36.2 numpy==2.4.6 \
  setuptools==65.5.0
cd "$folder"
venv/bin/python -W ignore - <<'END'
import logging
import time

from tensorboard import version
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

logging.disable()
print("tensorboard", version.VERSION)


def write(writer: EventFileWriter, tag: str, step: int) -> None:
    value = Summary.Value(tag=tag, simple_value=step)
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
    writer.flush()


def steps(reader: EventAccumulator) -> list[int]:
    return [event.step for event in reader.Reload().Scalars("rank-0")]


first = EventFileWriter("run", filename_suffix=".0")
write(first, "rank-0", 1)
time.sleep(1.1)  # the name of a file begins with the second in which it was made
second = EventFileWriter("run", filename_suffix=".1")
write(second, "rank-1", 1)
running = EventAccumulator("run")
before = steps(running)
for step in (2, 3):
    write(first, "rank-0", step)
seen, fresh = steps(running), steps(EventAccumulator("run"))
print(f"steps of rank 0: at first {before}, after two more steps {seen}, for a new reader {fresh}")
assert (before, seen, fresh) == ([1], [1], [1, 2, 3])
END
