"""A rehearsal as the only rank of a run on a target: its environment, and what a signal leaves of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpwire import log_record

WAITING = """
import json, os, sys, time
print(json.dumps(dict(os.environ)), file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_each_stop_signal_ends_a_rehearsal_with_a_record_and_without_a_folder(
    number: signal.Signals, tmp_path: Path
) -> None:
    plan = {"list": WAITING, "links": [], "command": ["-m", "train"], "env": ["SLURM_TOKEN"], "nodes": 1}
    environ = {"TMPDIR": str(tmp_path), "SLURM_TOKEN": "a", "LOCAL_TOKEN": "b", "LOCAL_RANK": "0", "SLURM_JOB_ID": "1"}
    argv = [sys.executable, "-P", "-m", "ddprun.rehearsal", json.dumps(plan), "--record"]
    with subprocess.Popen(
        argv, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        rank = json.loads(process.stderr.readline())
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert log_record.unpack_result(stdout) == {"runs": [], "signal": number}
    assert [*tmp_path.iterdir()] == []
    assert [rank.get(name) for name in ("SLURM_TOKEN", "LOCAL_TOKEN", "LOCAL_RANK", "SLURM_JOB_ID")] == [
        "a", "b", None, None,
    ]  # fmt: skip
