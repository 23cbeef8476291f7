"""Whoever says when a run is ended from outside, its ranks are asked in time to save."""

import math
import re
import time
from datetime import UTC, datetime
from typing import Any

START_S = 40  # more than a rank needs to start on a busy machine


def seconds_left(lines: list[str]) -> int:
    """The seconds in the one line about the deadline; on a busy machine it comes later."""
    (line,) = lines
    (found,) = re.findall(r"(\d+) s:", line)
    return int(found)


def test_ranks_save_before_the_deadline(runs: Any) -> None:
    ends_at = datetime.fromtimestamp(math.ceil(time.time()) + START_S, UTC)
    node = runs.start("act.py", "all=save", options=("--grace", "0.9"), env={"DDP_DEADLINE": ends_at.isoformat()})
    runs.wait_until_ready(node)
    assert node.end() == 143
    assert time.time() < ends_at.timestamp()
    assert node.log(0) == "ready\nsaved on SIGTERM\n"
    assert (node.outcome().cause, node.outcome().code, node.outcome().retry) == ("stopped", 143, True)
    assert 0 < seconds_left([line for line in node.messages() if "DDP_DEADLINE" in line]) <= 6
