"""What a script observes under torchrun, under ddprun and under ``ddprun --exec``: docs/results/torchrun.md.

A row that differs needs a reason in REASONS, and no other row has one. ``--update-golden`` writes the page again.
"""

from pathlib import Path

import pytest
from tests.nightly.e2e.torchrun_launches import CASES, PAGE, REASONS, case_of, observe_all, page_of, rows_of_page


@pytest.mark.parametrize("name", CASES)
def test_a_script_observes_what_the_page_says(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rows = observe_all(name, CASES[name], tmp_path)
    old = rows_of_page()
    if pytestconfig.getoption("--update-golden"):
        kept = {row: cells for row, cells in old.items() if case_of(row) != name} | rows
        PAGE.write_text(page_of({row: kept[row] for case in CASES for row in kept if case_of(row) == case}))
        old = rows_of_page()
    unexplained = {row: cells for row, cells in rows.items() if not cells[-1]}
    assert unexplained == {}
    assert {row: cells for row, cells in old.items() if case_of(row) == name} == rows
    superfluous = [row for row, cells in rows.items() if len(cells) == 1 and row in REASONS]
    assert superfluous == []


def test_the_page_has_each_reason() -> None:
    rows = rows_of_page()
    assert PAGE.read_text() == page_of(rows)
    assert len(rows) >= 60
    assert {cells[-1] for cells in rows.values() if len(cells) > 1} == {*REASONS.values()}
