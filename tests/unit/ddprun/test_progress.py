"""Progress lines while torch is imported: by ddprun itself, which has no thread then, and by its supervisor."""

import re

import pytest

from ddprun.output import progress
from ddprun.output.progress import Progress


def test_a_line_after_5_s_and_then_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    wait = Progress(lines.append, "importing torch")
    for _ in range(150):
        now[0] += 1
        wait.update()
    assert [int(re.findall(r"\d+", line)[0]) for line in lines] == [5, 10, 20, 40, 70, 100, 130]
    assert all("importing torch" in line for line in lines)
