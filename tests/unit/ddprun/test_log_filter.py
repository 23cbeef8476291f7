"""What of a rank's last words is shown, and when; and a real node whose ranks all cry when one fails."""

from typing import Any

from ddprun.output.log_view import HOLD_S, MAX_HELD_LINES, View

CRASH = [b"[rank1]: Traceback (most recent call last):", b"[rank1]:   File x", b"[rank1]: ValueError: bad label 17"]


class Screen:
    """A console with the view of one rank."""

    def __init__(self) -> None:
        self._shown: list[bytes] = []
        console: Any = self
        self.view = View(console, 1, b"", 0)

    def put(self, _descriptor: int, text: bytes, _source: object) -> None:
        self._shown.append(text.removesuffix(b"\n"))

    def shows(self, lines: list[bytes] = [], now: float = 0.0) -> list[bytes]:  # noqa: B006 -- it stays as it is
        """What is shown since the last call, after the rank has printed ``lines``."""
        self.view.accept(b"".join(line + b"\n" for line in lines), now) if lines else self.view.tick(now)
        shown, self._shown = self._shown, []
        return shown


def test_lines_are_held_from_a_crash_on_until_the_decision() -> None:
    guilty, peer = Screen(), Screen()
    assert guilty.shows([b"step 1"]) == [b"step 1"]
    assert guilty.shows([b"step 2", *CRASH[:2]]) == [b"step 2"]
    assert guilty.shows(CRASH[2:], 1.0) == []
    assert peer.shows(CRASH, 1.0) == []
    guilty.view.release()
    assert guilty.shows(now=1.0) == CRASH
    assert guilty.shows(CRASH, 2.0) == CRASH, "it has been judged"
    peer.view.suppress()
    peer.view.release()
    assert peer.shows([b"and more"], 2.0) == []
    assert (guilty.view.num_suppressed, peer.view.num_suppressed) == (0, 4)


def test_a_script_that_catches_its_error_is_shown_after_a_while() -> None:
    screen = Screen()
    assert screen.shows(CRASH) == []
    assert screen.view.needs_tick
    assert screen.shows(now=HOLD_S - 0.1) == []
    assert screen.shows(now=HOLD_S + 0.1) == CRASH
    assert (screen.view.needs_tick, screen.shows([b"step 3"], HOLD_S + 0.2)) == (False, [b"step 3"])
    assert screen.shows(CRASH, 20.0) == [], "and the next error is held again"
    assert len(screen.shows([b"step"] * MAX_HELD_LINES, 20.1)) == MAX_HELD_LINES + 3


def test_a_traceback_or_an_abort_begins_a_crash() -> None:
    for line in (CRASH[0], b"[rank1]: " + CRASH[0], b"Traceback (most recent call last):",
                 b"terminate called after throwing an instance of 'x'",
                 b"[rank3]:[E1120 17:00:00.1 ProcessGroupNCCL.cpp:1] Watchdog"):  # fmt: skip
        assert Screen().shows([line]) == []
    for line in (
        b"epoch 1",
        b"[rank3]:[W1120 17:00:00.1 x.cpp:1] a warning",
        b"see Traceback (most recent call last):",
    ):
        assert Screen().shows([line]) == [line]
