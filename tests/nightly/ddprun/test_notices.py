"""Notices of odd and of endless output."""

import pytest
from tests.contract.ddprun.test_notices import TEXTS, notices


@pytest.mark.parametrize("text", ["a\\0b", "a\\ud800b"])
def test_an_exception_with_odd_characters_is_told(runs, tmp_path, text):
    (tmp_path / "odd.py").write_text(f'raise ValueError("{text}")')
    node = runs.start(str(tmp_path / "odd.py"), options=("--notify", TEXTS.format(tmp_path / "told")))
    assert node.end() == 1
    assert notices(node) == [("failed", 1, "sent")]
    assert "ValueError" in (tmp_path / "told").read_text()


def test_of_an_endless_output_the_log_has_the_beginning(runs):
    node = runs.start("act.py", "all=0", options=("--notify", "yes | head -c 1000000"))
    assert node.end() == 0
    assert notices(node) == [("succeeded", 1, "sent")]
    assert 0 < sum("notify: y" in line for line in node.stderr.read_text().splitlines()) <= 20


def test_a_notice_stays_unknown_if_ddprun_is_killed_while_it_is_sent(runs, tmp_path):
    node = runs.start("act.py", "all=0", options=("--notify", f"touch {tmp_path}/begun; sleep 600"))
    runs.until((tmp_path / "begun").exists)
    node.process.kill()
    node.process.wait()
    assert notices(node) == [("succeeded", 1, "sending")]
    runs.until(lambda: runs.remaining() == [])
