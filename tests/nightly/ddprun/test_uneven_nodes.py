"""Nodes with different numbers of ranks that are lost: a run that shrinks, and spares that take a place."""

import json

import pytest
from tests.messages import assert_names


def start(runs, *counts, spares=(), nodes=None):
    """Start nodes with these numbers of ranks, and spares that can start these numbers of ranks."""
    port, machines = runs.free_port(), []
    for machine, count in enumerate((*counts, *spares)):
        options = ("--nproc-per-node", str(count), "--spares", str(len(spares)))
        place = {"node": machine, "nodes": nodes or str(len(counts)), "port": port}
        machines.append(runs.start("act.py", "again=0", options=options, **place))
    firsts = [(node, sum(counts[:node])) for node in range(len(counts))]
    runs.until(lambda: all(machines[node].log(rank) == "ready\n" for node, rank in firsts))
    return machines


@pytest.mark.parametrize(("lost", "ranks", "spares"), [(1, [2], (2,)), (0, [0, 1], (3,))])
def test_a_spare_starts_as_many_ranks_as_the_node_whose_place_it_takes(runs, lost, ranks, spares):
    *nodes, spare = start(runs, 2, 1, spares=spares)
    nodes[lost].process.kill()
    assert [nodes[1 - lost].end(), spare.end()] == [0, 0]
    started = [event for event in spare.events() if event.event == "ranks_started"]
    assert [(event.facts["ranks"], event.facts["world_size"]) for event in started] == [(ranks, 3)]
    assert json.loads((spare.folder / "node.json").read_text())["node"] == lost


def test_a_spare_with_too_few_ranks_does_not_take_a_place(runs):
    first, second, spare = start(runs, 2, 1, spares=(1,))
    assert_names("\n".join(first.messages()), "spare 2", "node 0", "--nproc-per-node 1")
    first.process.kill()
    assert [second.end() != 0, spare.end() != 0] == [True, True]
    assert second.outcome().cause == "node_lost"


def test_the_smallest_spare_that_is_large_enough_takes_the_place(runs):
    first, second, third, large, small = start(runs, 2, 1, 1, spares=(4, 1))
    second.process.kill()
    assert [node.end() for node in (first, third, large, small)] == [0, 0, 0, 0]
    took = [[event.event for event in spare.events()].count("took_place") for spare in (large, small)]
    assert took == [0, 1]


def test_a_run_that_shrinks_numbers_the_ranks_again(runs):
    first, second, third = start(runs, 2, 1, 3, nodes="2:3")
    second.process.kill()
    assert [first.end(), third.end()] == [0, 0]
    for node, ranks in ((first, [[0, 1], [0, 1]]), (third, [[3, 4, 5], [2, 3, 4]])):
        started = [event.facts for event in node.events() if event.event == "ranks_started"]
        assert [facts["ranks"] for facts in started] == ranks
        assert [facts["world_size"] for facts in started] == [6, 5]
    assert "ddp_world_size_expected 6.0" in (first.folder / "metrics.prom").read_text()
