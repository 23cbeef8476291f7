"""What is written of several sources: every byte of a lone one, whole lines and the states of bars of several."""

import pytest

from ddpwire import merged_output
from ddpwire.merged_output import MergedOutput


class Screen:
    """An output, its sources, and a clock that stands still."""

    def __init__(self, monkeypatch, num_sources, mark=None):
        self.now, self._text = 100.0, b""
        monkeypatch.setattr(merged_output.time, "monotonic", lambda: self.now)
        output = MergedOutput(self._write)
        self.sources = [output.add_source(mark) for _ in range(num_sources)]

    def _write(self, data):
        self._text += data

    def add(self, number, data):
        """What is written when a source adds ``data``."""
        before, self._text = self._text, b""
        assert before == b""
        self.sources[number].add(data)
        return self.taken()

    def taken(self):
        text, self._text = self._text, b""
        return text


def test_a_lone_source_is_passed_on_as_it_comes(monkeypatch):
    screen = Screen(monkeypatch, 1)
    for text in (b"a\nb", b"c\n", b"\r 1%", b"\r 2", b"%\n", b"(Pdb) ", b"x\ny"):
        assert screen.add(0, text) == text
    screen.sources[0].close()
    assert screen.taken() == b"\n"


def test_of_several_the_last_state_of_a_bar_is_written_once_a_second(monkeypatch):
    screen = Screen(monkeypatch, 2)
    assert screen.add(0, b"\r 1%\r 2%") == b" 2%"
    assert screen.add(0, b"\r 3%") == b""
    screen.now += 1
    assert screen.add(0, b"") == b"\r 3%"
    assert screen.add(0, b"\r 4%\n") == b"\r 4%\n"
    screen.now += 1
    assert screen.add(0, b"\r 5%") == b" 5%"
    assert screen.add(0, b"\n") == b"\n"


def test_two_sources_share_no_line(monkeypatch):
    screen = Screen(monkeypatch, 2)
    assert screen.add(0, b"\r 1%") == b" 1%"
    assert screen.add(1, b"a line\nhalf") == b"\na line\n"
    assert screen.add(0, b"\r 2%\n") == b" 2%\n"
    assert screen.add(1, b" a line\n") == b"half a line\n"
    assert screen.add(1, b"crlf\r\n") == b"crlf\r\n"


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_mark_stands_before_each_line_and_state(monkeypatch, num_sources):
    screen = Screen(monkeypatch, num_sources, mark=lambda line: b"[rank0] " + line)
    assert screen.add(0, b"a\nhalf") == b"[rank0] a\n"
    assert screen.add(0, b"\n") == b"[rank0] half\n"
    assert screen.add(0, b"\r 1%") == b"[rank0]  1%"
    assert screen.add(0, b"\r 2%\n") == b"\r[rank0]  2%\n"
    screen.sources[0].close()
    assert screen.taken() == b""
