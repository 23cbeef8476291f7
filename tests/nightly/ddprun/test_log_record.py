"""A node's events and history in its log: what is packed, how much of a long run, and what is read of a strange log."""

import base64
import json
import random
import zlib
from pathlib import Path

from ddpwire import log_record
from ddpwire.events import EVENTS, EventLog
from ddpwire.history import HEADER, HISTORY, line
from ddpwire.run_files import ENVIRONMENT


def log_of(node_dir: Path, node: int = 1) -> str:
    return "[node1 rank0] epoch 1\n" + "".join(f"[node{node}] {one}\n" for one in log_record.pack(node_dir))


def write(node_dir: Path, *, rows: int, events: int) -> None:
    log = EventLog(node_dir / EVENTS, node=1)
    for number in range(events):
        log.emit(
            "checkpoint_saved", step=number, noise=[random.Random(number * 9 + more).random() for more in range(4)]
        )
    noise = random.Random(0)
    steps = [line(1e9 + row, {"ddp_loss": noise.random(), "ddp_last_step": float(row)}) for row in range(rows)]
    (node_dir / HISTORY).write_text("\n".join((HEADER, *steps, "")))
    (node_dir / ENVIRONMENT).write_text('{"torch": "2.9"}')


def test_the_last_whole_record_counts_and_a_strange_one_does_not(tmp_path: Path) -> None:
    write(tmp_path, rows=1, events=0)
    first = log_of(tmp_path)
    strange = base64.b64encode(zlib.compress(json.dumps({"../x": "1", EVENTS: 2}).encode())).decode()
    for more in (
        "ddprun-record 1/2 QUJD",
        "ddprun-record 2/2 QUJD",
        "ddprun-record 1/1 QUJD",
        f"ddprun-record 1/1 {strange}",
    ):
        assert log_record.unpack(f"{first}[node1] {more}\n") == log_record.unpack(first)
    assert log_record.unpack("") == log_record.unpack("[node1] ddprun-record 1/0 QUJD\n") == {}
    assert log_record.pack(tmp_path / "nothing") == ()
