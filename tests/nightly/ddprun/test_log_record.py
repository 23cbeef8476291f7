"""A node's events and history in its log: what is packed, how much of a long run, and what is read of a strange log."""

import base64
import json
import zlib
from pathlib import Path

from tests.unit.ddpwire.test_log_record import write

from ddpwire import log_record
from ddpwire.events import EVENTS
from ddpwire.run_files import ENVIRONMENT


def log_of(node_dir: Path, node: int = 1) -> str:
    return "[node1 rank0] epoch 1\n" + "".join(f"[node{node}] {part}\n" for part in log_record.pack(node_dir, 1e6))


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
    assert log_record.pack(tmp_path / "nothing", 1e6) == ()


def test_what_is_kept_of_an_earlier_pod_stays(tmp_path: Path) -> None:
    for events in ("a\n", "b\n", "b\nc\n"):
        log_record.keep(tmp_path / "node-1", {EVENTS: events, ENVIRONMENT: events})
    assert (tmp_path / "node-1" / EVENTS).read_text() == "a\nb\nc\n"
    assert (tmp_path / "node-1" / ENVIRONMENT).read_text() == "b\nc\n"
