"""What is written of several sources: every byte of a lone one, whole lines and the states of bars of several."""

from tests.unit.ddpwire.test_merged_output import Screen


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
