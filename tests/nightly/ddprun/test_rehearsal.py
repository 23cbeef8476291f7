"""Facts that are no numbers or strings, as a rehearsal observes them."""

from ddprun.ranks.observer import _number, _values


def test_indices_and_states_of_any_kind_are_observed() -> None:
    assert _number((0, 3)) < 0
    assert (_number(True), _number(7), _number((0, 3)) == _number((0, 3)) != _number((3, 0))) == (1, 7, True)
    assert (_values({"b": 2, "a": 1}), _values(3)) == ([1, 2], [3])
