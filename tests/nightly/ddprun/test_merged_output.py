"""What is written of several sources: every byte of a lone one, whole lines and the states of bars of several."""

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


def test_a_bar_that_is_over_does_not_overwrite_its_mark(monkeypatch):
    screen = Screen(monkeypatch, 1, lambda line: b"[rank0] " + line)
    assert screen.add(0, b" 1%\r 2%\nend\r\n") == b"[rank0]  2%\n[rank0] end\n"


def test_a_bar_whose_states_end_with_the_carriage_return(monkeypatch):
    screen = Screen(monkeypatch, 2)
    assert screen.add(0, b" 1%\r") == b" 1%"
    screen.now += 1
    assert screen.add(0, b" 2%\r 3%\r") == b"\r 3%"
    assert screen.add(0, b" 4%\n") == b"\r 4%\n"


def test_a_second_source_that_comes_later(monkeypatch):
    screen = Screen(monkeypatch, 1)
    assert screen.add(0, b"(Pdb) ") == b"(Pdb) "
    second = screen.sources[0]._output.add_source()
    second.add(b"a line\n")
    assert screen.taken() == b"\na line\n"
    assert screen.add(0, b"x\n") == b"x\n"
