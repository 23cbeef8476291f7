"""A step of ``--deterministic`` does the same sums and draws the same numbers wherever its process started."""

import sys

import exact
import pytest
from tests import forks


def test_three_ranks_killed_in_the_middle_end_with_the_undisturbed_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of bench/exact.py; tests/cluster/test_exact.py has more."""
    monkeypatch.setattr(exact, "run_python", forks.run)
    monkeypatch.setattr(sys, "argv", ["exact.py", "--groups", "ranks", "--rows", "^3 ranks"])
    with pytest.raises(SystemExit) as ended:
        exact.main()
    said, errors = capsys.readouterr()
    assert ended.value.code == 0, said + errors
    assert said.count(" equal |") == 1
