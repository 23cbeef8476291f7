"""Events: whole lines, in bounded files, that a reader of another version survives."""

from ddpwire.events import read_events, strange_lines

STRANGE = (
    '{"time": Infinity, "event": "a", "node": 0}',
    '{"time": NaN, "event": "a", "node": 0}',
    '{"time": "x", "event": "a", "node": 0}',
    '{"time": 1, "event": "a", "node": "x"}',
    '{"time": 1, "event": "a", "node": 0, "rank": []}',
    '{"time": 1, "event": "a", "node": 0, "seconds": "x"}',
    '{"time": 1, "event": "a", "node": 0, "seconds": NaN}',
    '{"time": 1, "event": null, "node": 0}',
    "[" * 200_000,
)


def test_values_of_another_kind_are_passed_over_and_counted() -> None:
    text = "\n".join(('{"time": 1, "event": "a", "node": 0}', *STRANGE)) + "\n"
    assert [event.event for event in read_events(text)] == ["a"]
    assert strange_lines(text) == len(STRANGE)
    assert strange_lines('"a", "node": 0}\n{"time": 1, "event": "a", "node": 0}\n{"time": 2, "ev') == 0, (
        "cut, not strange"
    )
    assert strange_lines("") == 0
