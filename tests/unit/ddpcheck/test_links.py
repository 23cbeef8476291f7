"""Which pairs meet when, and what is suspected from their figures."""

from itertools import combinations

import pytest

from ddpcheck.links import Pair, Suspect, rounds, suspected_links, suspected_nodes


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 13])
def test_each_two_meet_once_and_nobody_is_in_two_pairs_at_once(number: int) -> None:
    played = [*rounds(number)]
    assert len(played) == number - 1 + number % 2
    assert sorted(pair for pairs in played for pair in pairs) == [*combinations(range(number), 2)]
    for pairs in played:
        busy = [node for pair in pairs for node in pair]
        assert len({*busy}) == len(busy) == number - number % 2


def figures(number: int, slow: dict[Pair, float]) -> dict[Pair, float]:
    return {pair: slow.get(pair, 1.0 + sum(pair) / 100) for pair in combinations(range(number), 2)}


def of_node(number: int, *nodes: int) -> dict[Pair, float]:
    return {pair: 0.1 for pair in combinations(range(number), 2) if {*pair} & {*nodes}}


def suspected(number: int, slow: dict[Pair, float]) -> tuple[list[tuple[int, ...]], bool]:
    nodes, note = suspected_nodes(figures(number, slow), number)
    links, more = suspected_links(figures(number, slow), number, [suspect.members[0] for suspect in nodes])
    suspects = (*nodes, *links)
    for suspect in suspects:
        assert not {suspect.pair} & {*suspect.beside}
        assert all({*suspect.pair} & {*pair} for pair in suspect.beside)
    return [suspect.members for suspect in suspects], bool(note or more)


def test_a_slow_link_or_node_is_suspected_and_nothing_sound() -> None:
    for number in (3, 4, 5, 9):
        assert suspected(number, {}) == ([], False)
        assert suspected(number, {(0, 2): 0.4}) == ([(0, 2)], False)
        assert suspected(number, {(0, 2): 0.7}) == ([], False)
        assert suspected(number, of_node(number, 1)) == ([(1,)], False)
    assert suspected(6, {(0, 2): 0.3, (1, 4): 0.2}) == ([(1, 4), (0, 2)], False)
    assert suspected(6, of_node(6, 1, 4)) == ([(1,), (4,)], False)
    assert suspected(8, of_node(8, 5) | {(0, 1): 0.2}) == ([(5,), (0, 1)], False)


def test_a_suspect_is_named_if_it_is_slow_alone_too() -> None:
    def is_slow(*measured: tuple[float, float]) -> bool:
        return Suspect(members=(0, 1), pair=(0, 1), beside=((0, 2),), figures=measured).is_slow

    assert is_slow((0.1, 1.0), (0.2, 0.9), (0.1, 0.1))  # once the link beside it was held up
    assert not is_slow((0.1, 1.0), (0.6, 1.0), (0.1, 1.0))  # it can be quicker
    assert not is_slow((0.1, 0.1), (0.1, 1.0), (0.1, 0.1))
