"""How things are worded: what a program said moves no cursor, what is cut can be seen, a length of time reads alike."""

import pytest

from ddpctl.text import EscapeFilter, cut, format_duration, plain


def test_control_characters_of_a_program_are_not_shown() -> None:
    assert plain("\x1b[1;31mred\x1b[0m\tx\nstep 1\rstep 2\r\n\x1b]0;title\x07\u202eevil") == (
        "red x\nstep 2\n\\x1b]0;title\\x07\\u202eevil"
    )


def test_a_long_line_is_cut_to_the_columns() -> None:
    assert [cut("a long line", width) for width in (11, 10, 3)] == ["a long line", "a long li…", "a…"]
    assert cut("a long line", 10, plain=True) == "a long..."


def test_a_duration_is_formatted_by_its_length() -> None:
    assert [format_duration(seconds) for seconds in (0.04, 9.94, 31.4, 125, 7451)] == [
        "0.0 s",
        "9.9 s",
        "31 s",
        "2:05",
        "2:04:11",
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_escape_sequence_passes_however_it_comes(size: int) -> None:
    text = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\x1bcb\x9b5m\t\r\b\x07ä\n".encode()
    keep = EscapeFilter()
    output = b"".join(keep(text[start : start + size]) for start in range(0, len(text), size))
    assert output == "aredb5m\t\r\bä\n".encode()


def test_what_looks_like_a_sequence_is_not_kept_for_ever() -> None:
    keep = EscapeFilter()
    assert keep(b"\x1b]52;" + b"x" * 5000).endswith(b"x" * 5000)
