"""Two machines that are set up wrongly: what is named, and the code, by the command that writes the docs' table."""

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
# By title: what the sentence names, and the exit code.
NAMED = {
    "the master's address is not node 0's": (("10.77.0.99", "10.77.0.10 (eth0)"), 69),
    "node 0's machine is down": (("node 0 of 2", "node-1 (10.77.0.11)", "10.77.0.99:61234"), 142),
    "another image": (("train:1@sha256:b2 on node 1", "train:2@sha256:a1 on node 0"), 78),
    "the script gets different arguments on each node": (("--lr", "node 1", "node 0"), 0),
}


def test_a_mistake_is_told_with_its_code_and_measured_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", PATH)
    results = tmp_path / "results.json"

    def measure(*options: str) -> tuple[object, str, str]:
        """The exit code, stdout and stderr."""
        monkeypatch.setattr(sys, "argv", ["misconfigured.py", "--results", str(results), *options, *NAMED])
        with pytest.raises(SystemExit) as ended:
            misconfigured.main()
        return ended.value.code, *capsys.readouterr()

    assert measure("--for", "0")[:2] == (75, "")
    done = measure()
    assert (done[0], done[2]) == (0, "")
    rows = json.loads(results.read_text())["rows"]
    assert {title: row["ddprun"]["code"] for title, row in rows.items()} == {
        title: code for title, (_, code) in NAMED.items()
    }
    for title, (facts, _) in NAMED.items():
        sentence = rows[title]["ddprun"]["said"]
        assert [fact for fact in facts if fact not in sentence] == [], sentence
    assert measure() == done
