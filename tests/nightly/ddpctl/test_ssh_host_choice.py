"""Which hosts a launch takes: spares, excluded hosts, those of a resumed run's checkpoints, and the queue for GPUs."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl import test_ssh_host_choice
from tests.unit.ddpctl.answers import matching, perform
from tests.unit.ddpctl.ssh_answers import ANSWERS, FACTS, RUN, START, by_host, facts
from tests.unit.ddpctl.test_ssh_host_choice import AGAIN, BOXES, DEAD, ON_TWO, OPTIONS, PLAN, STATE, chosen, shows, wait

from ddpctl.errors import UnavailableError
from ddpctl.job.launch_plan import Plan
from ddpctl.targets.ssh.target import SshTarget


def nodes(text: str) -> Plan:
    return replace(PLAN, job=replace(PLAN.job, nodes=text))


def test_fewer_nodes_where_the_job_may_have_fewer() -> None:
    choice, _ = chosen(nodes("2:4"), box1=DEAD)
    assert (choice.numbers, choice.nodes(nodes("2:4").job)) == ((1, 2, 3), "2:3")
    assert chosen(nodes("2:5"), replace(OPTIONS, exclude=("box1",)))[0].numbers == (1, 2, 3)
    assert chosen(nodes("3:4"), box1=DEAD)[0].nodes(nodes("3:4").job) == "3"
    with pytest.raises(UnavailableError) as error:
        chosen(nodes("3:4"), box1=DEAD, box3=DEAD)
    assert "2 of 4" in str(error.value).splitlines()[0]


def test_a_resumed_run_whose_host_is_dead_starts_from_another_host_s_checkpoint() -> None:
    choice, _ = chosen(AGAIN, box1=DEAD, box3=facts(3, checkpoint="step-00000040.pt"))
    assert choice.numbers == (2, 1)
    assert [fact in choice.notes[0] for fact in (RUN.checkpoint_dir, "step-00000040.pt", "box3")] == [True] * 3


def test_a_resumed_run_whose_folder_is_empty_starts_from_a_copy() -> None:
    choice, _ = chosen(AGAIN, box3=facts(3, checkpoint="step-00000040.pt", copy='{"step": 40}'), box2=DEAD)
    assert choice.numbers == (2, 0)
    assert ("step 40" in choice.notes[0], "box3" in choice.notes[0]) == (True, True)


def test_a_wait_ends_where_the_host_of_a_ticket_is_lost() -> None:
    with pytest.raises(UnavailableError) as error:
        wait(BOXES[:2], {"box2": [DEAD]})
    assert ("box2" in str(error.value), "no route to host" in str(error.value)) == (True, True)


def test_a_lost_node_without_a_spare_that_is_ready_is_named() -> None:
    states, spares = by_host(shows("rendezvous"), DEAD), {"box3": DEAD, "box4": DEAD}
    commands, moved = perform(SshTarget(OPTIONS).replace_lost(ON_TWO), {FACTS: spares, **ANSWERS, STATE: states})
    assert (moved.nodes, matching(commands, START)) == ((), [])
    assert [fact in moved.note for fact in ("box2 (node 1)", "box3", "box4", "no route to host")] == [True] * 4
    assert not SshTarget(replace(OPTIONS, hosts=BOXES[:2])).has_spares(ON_TWO)


@pytest.mark.parametrize(
    ("gpus", "holder", "dead", "numbers"),
    [
        pytest.param((2, 1), "box4", ("box1",), (3, 1), id="spare-again"),
        pytest.param((2, 1), "box4", ("box2",), (3, 0), id="predecessor-replaces-a-smaller-host"),
        pytest.param((1, 2), "box4", ("box2", "box3"), None, id="too-few-gpus-for-node-1"),
        pytest.param((1, 2), "box3", ("box2",), (2, 3), id="spare-for-node-1"),
    ],
)
def test_a_resumed_run_keeps_the_order_of_hosts_with_their_own_numbers_of_gpus(gpus, holder, dead, numbers):
    test_ssh_host_choice.test_a_resumed_run_keeps_the_order_of_hosts_with_their_own_numbers_of_gpus(
        gpus, holder, dead, numbers
    )
