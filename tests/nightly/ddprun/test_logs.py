"""Lines on their way: whoever reads them slowly, or not at all, never blocks a rank for long, and never tears one."""

import os

from ddprun.output.console import Console
from ddprun.output.logs import RankLogs
from ddprun.settings import node_config, options


def test_a_rank_that_ends_is_caught_up_while_its_streams_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("ddprun.output.logs.time.sleep", lambda _: None)  # look without a pause
    monkeypatch.setattr("ddprun.output.logs.CATCH_UP_S", 240.0)  # the thread that reads may be kept from a core
    config = node_config.read_config(options.parse(["--nproc-per-node=1", "x.py"]), {}, lambda _: 1)
    logs = RankLogs(Console("node0"), config)
    for attempt in range(300):
        path = tmp_path / f"{attempt}.log"
        streams = logs.open(0, 0, path)
        os.write(streams.stdout, b"last words\n")
        streams.close()
        logs.catch_up(0)  # raised EBADF for a descriptor that the thread had just closed
        assert path.read_bytes() == b"last words\n"
        logs.close_attempt(restarting=True)
