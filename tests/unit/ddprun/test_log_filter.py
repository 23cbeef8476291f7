"""What of a rank's last words is shown, and when; and a real node whose ranks all cry when one fails."""

from ddprun.output.log_view import HOLD_S, MAX_HELD_LINES, LogFilter

CRASH = [b"[rank1]: Traceback (most recent call last):", b"[rank1]:   File x", b"[rank1]: ValueError: bad label 17"]


def test_lines_are_held_from_a_crash_on_until_the_decision() -> None:
    guilty, peer = LogFilter(), LogFilter()
    assert guilty.accept([b"step 1"], 0.0) == [b"step 1"]
    assert guilty.accept([b"step 2", *CRASH[:2]], 0.0) == [b"step 2"]
    assert guilty.accept(CRASH[2:], 1.0) == []
    assert peer.accept(CRASH, 1.0) == []
    assert guilty.release() == CRASH
    assert guilty.accept(CRASH, 2.0) == CRASH, "it has been judged"
    peer.suppress()
    assert peer.release() == []
    assert peer.accept([b"and more"], 2.0) == []
    assert (guilty.num_suppressed, peer.num_suppressed) == (0, 4)


def test_a_script_that_catches_its_error_is_shown_after_a_while() -> None:
    log_filter = LogFilter()
    assert log_filter.accept(CRASH, 0.0) == []
    assert log_filter.is_holding
    assert log_filter.release_due(HOLD_S - 0.1) == []
    assert log_filter.release_due(HOLD_S + 0.1) == CRASH
    assert (log_filter.is_holding, log_filter.accept([b"step 3"], HOLD_S + 0.2)) == (False, [b"step 3"])
    assert log_filter.accept(CRASH, 20.0) == [], "and the next error is held again"
    assert len(log_filter.accept([b"step"] * MAX_HELD_LINES, 20.1)) == MAX_HELD_LINES + 3


def test_a_traceback_or_an_abort_begins_a_crash() -> None:
    for line in (CRASH[0], b"[rank1]: " + CRASH[0], b"Traceback (most recent call last):",
                 b"terminate called after throwing an instance of 'x'",
                 b"[rank3]:[E1120 17:00:00.1 ProcessGroupNCCL.cpp:1] Watchdog"):  # fmt: skip
        assert LogFilter().accept([line], 0.0) == []
    for line in (
        b"epoch 1",
        b"[rank3]:[W1120 17:00:00.1 x.cpp:1] a warning",
        b"see Traceback (most recent call last):",
    ):
        assert LogFilter().accept([line], 0.0) == [line]
