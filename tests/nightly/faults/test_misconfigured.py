"""Two machines that are set up wrongly: the sentence and the code, by the command that writes the table in the docs."""

import json
import os
import shutil
import sys
from pathlib import Path

import misconfigured
import pytest

PATH = os.environ["PATH"]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or not shutil.which("ip"),
    reason="needs root on Linux (network namespaces), and ip (apt install iproute2)",
)
SAID = {
    "the master's address is not node 0's": (
        "10.77.0.99 is not an address of this machine, but node 0 must listen on it; "
        "this machine has 10.77.0.10 (eth0)",
        69,
    ),
    "node 0's machine is down": (
        "node 0 of 2 did not join within 2 s: node-1 (10.77.0.11) tried to connect, but 10.77.0.99:61234 cannot be "
        "reached: that machine or its link is down, or a router rejects the connection",
        142,
    ),
    "another image": (
        "the nodes do not match: image is train:1@sha256:b2 on node 1, but train:2@sha256:a1 on node 0; "
        "make all nodes the same",
        78,
    ),
    "the script gets different arguments on each node": (
        "warning: --lr of the script is not the same on node 1 as on node 0",
        0,
    ),
}


def test_a_mistake_is_told_with_its_code_and_measured_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", PATH)
    results = tmp_path / "results.json"

    def measure(*options: str) -> tuple[object, str, str]:
        """The exit code, stdout and stderr."""
        monkeypatch.setattr(sys, "argv", ["misconfigured.py", "--results", str(results), *options, *SAID])
        with pytest.raises(SystemExit) as ended:
            misconfigured.main()
        return ended.value.code, *capsys.readouterr()

    begun = measure("--for", "0")
    assert begun == (75, "", "the time of --for is over; some rows are not measured yet\n")
    done = measure()
    assert (done[0], done[2]) == (0, "")
    rows = json.loads(results.read_text())["rows"]
    assert {title: (row["ddprun"]["said"], row["ddprun"]["code"]) for title, row in rows.items()} == SAID
    assert measure() == done
