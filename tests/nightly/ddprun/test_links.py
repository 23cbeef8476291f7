"""Which links the check leaves unnamed."""

from itertools import combinations

from tests.unit.ddpcheck.test_findings import of_node, suspected

from ddpcheck.links import Suspect, confirmed


def test_nothing_is_suspected_without_siblings_or_where_the_network_has_parts() -> None:
    assert suspected(2, {(0, 1): 0.001}) == ([], True)
    racks = {pair: 0.2 for pair in combinations(range(6), 2) if (pair[0] < 3) != (pair[1] < 3)}
    assert suspected(6, racks)[0] == []
    bridges = {pair: 0.1 for pair in combinations(range(8), 2) if pair[0] // 2 != pair[1] // 2}
    assert suspected(8, bridges)[0] == []


def test_other_work_on_the_machine_hides_no_slow_node() -> None:
    held_up = {(0, 1): 0.5, (0, 3): 0.47}  # while node 0 was measured; node 2 is slow
    assert suspected(4, of_node(4, 2) | held_up) == ([(0,), (2,)], False)


def test_nothing_is_reported_where_more_than_a_third_is_slow() -> None:
    slow = [Suspect(members=(node,), pair=(0, 1), beside=(), figures=((0.1, 1.0),)) for node in range(2)]
    quick = Suspect(members=(2,), pair=(0, 1), beside=(), figures=((1.0, 1.0),))
    assert confirmed((*slow, quick), 6, "nodes") == ((*slow,), "")
    reported, note = confirmed(slow, 5, "nodes")
    assert reported == ()
    assert note
