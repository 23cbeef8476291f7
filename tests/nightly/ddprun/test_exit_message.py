"""The sentence at the end of a run that failed: told once, by the node that it is about, with the right log."""

from pathlib import Path

import pytest


def test_two_nodes_report_the_failure_once_and_without_torchs_own_prefix(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_LAUNCHER", "local")  # which shows the lines of both
    first, second = runs.pair("torn.py", options=("--max-restarts", "0"))
    assert (first.end(timeout_s=300), second.end()) == (1, 1)
    assert first.stdout.read_text() == ""
    messages = [*first.messages(), *second.messages()]
    (line,) = [line for line in messages if "ValueError: bad label 17" in line]
    assert line.startswith("[node1] ")
    assert "RUN/node-1/rank-1.log" in line
    shown = [line for line in second.rank_lines() if "^^^" not in line]
    script = Path(__file__).parent / "scripts/torn.py"
    assert shown == [
        "[node1 rank1] Traceback (most recent call last):",
        f'[node1 rank1]   File "{script}", line 8, in <module>',
        '[node1 rank1]     raise ValueError("bad label 17")',
        "[node1 rank1] ValueError: bad label 17",
    ]
    assert "[rank1]: ValueError: bad label 17\n" in second.log(1), "its file is as it wrote it"
