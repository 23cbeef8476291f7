"""Which hosts a launch takes, for recorded answers: spares, excluded hosts, a resumed run's checkpoints, the line."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.unit.ddpctl.ssh_answers import GPUS, PLAN, RUN, SECRET, facts, play
from tests.wording import Wording

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import UnavailableError
from ddpctl.launch_plan import Plan
from ddpctl.targets.ssh.host_choice import Choice, choose, wait_in_line
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import Facts, parse_facts
from ddpctl.targets.ssh.target import SshTarget

BOXES = tuple(SshHost(address=f"box{number}") for number in (1, 2, 3, 4))
OPTIONS = SshOptions(hosts=BOXES)
PLAN = replace(PLAN, uid="12ab")
DEAD = Output(returncode=255, stderr="no route to host\n")


def chosen(plan: Plan, options: SshOptions = OPTIONS, **said: Output) -> tuple[Choice, list[str]]:
    """The choice where the hosts say that, and the hosts that were asked; those that are not named are ready."""
    asked: list[str] = []

    def look(hosts: Sequence[SshHost]) -> Verb[tuple[Facts, ...]]:
        asked.extend(host.address for host in hosts)
        yield ()
        return tuple(parse_facts(said.get(host.address, facts(1))) for host in hosts)

    verb = choose(options, plan, look)
    try:
        while True:
            next(verb)
    except StopIteration as stop:
        return stop.value, asked


def nodes(text: str) -> Plan:
    return replace(PLAN, job=replace(PLAN.job, nodes=text))


def test_the_first_hosts_and_no_spare_is_asked() -> None:
    choice, asked = chosen(PLAN)
    assert (choice.numbers, choice.notes, asked) == ((0, 1), (), ["box1", "box2"])


def test_a_dead_host_is_passed_over(wording: Wording) -> None:
    choice, asked = chosen(PLAN, box2=DEAD)
    assert (choice.numbers, asked) == ((0, 2), ["box1", "box2", "box3", "box4"])
    for note in choice.notes:
        wording(note)
    choice, _ = chosen(PLAN, replace(OPTIONS, exclude=("box1", "box3")))
    assert choice.numbers == (1, 3)


def test_fewer_nodes_where_the_job_may_have_fewer(wording: Wording) -> None:
    choice, _ = chosen(nodes("2:4"), box1=DEAD)
    assert (choice.numbers, choice.nodes(nodes("2:4").job)) == ((1, 2, 3), "2:3")
    assert chosen(nodes("2:5"), replace(OPTIONS, exclude=("box1",)))[0].numbers == (1, 2, 3)
    assert chosen(nodes("3:4"), box1=DEAD)[0].nodes(nodes("3:4").job) == "3"
    with pytest.raises(UnavailableError) as error:
        chosen(nodes("3:4"), box1=DEAD, box3=DEAD)
    wording(str(error.value).splitlines()[0])


def test_a_resumed_run_is_where_its_checkpoints_are(wording: Wording) -> None:
    again = replace(PLAN, run="night-2", run_dir="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
    assert chosen(replace(again, checkpoint_dir="box3:~/c"))[0].numbers == (2, 0)
    choice, _ = chosen(again, box1=DEAD, box3=facts(3, checkpoint="step-00000040.pt"))
    assert choice.numbers == (2, 1)
    wording(choice.notes[0])
    copies = {"box2": facts(2, checkpoint="z.pt", step="30"), "box4": facts(4, checkpoint="a.pt", step="40")}
    choice, _ = chosen(again, box1=DEAD, **copies)
    assert choice.numbers == (3, 1), "the newest complete copy"
    wording(choice.notes[0])
    copies["box3"] = facts(3, announced="50")  # a copy that was cut has no manifest: it is not a checkpoint
    choice, _ = chosen(again, box1=DEAD, **copies)
    assert choice.numbers == (3, 1)
    wording(choice.notes[0])
    choice, _ = chosen(again, box3=facts(3, checkpoint="step-00000040.pt", step="40"), box2=DEAD)
    assert choice.numbers == (2, 0), "box1 lives, and its folder is empty"
    wording(choice.notes[0])
    for options, dead in ((OPTIONS, DEAD), (replace(OPTIONS, exclude=("box1",)), facts(1))):
        with pytest.raises(UnavailableError) as error:
            chosen(again, options, box1=dead)
        wording(error.value)
    shared = replace(OPTIONS, checkpoint_dir="/nfs")
    assert chosen(again, shared, box1=DEAD)[0].numbers == (1, 2)


def line(*runs: str, free: int = 3) -> Output:
    tickets = tuple(f"{number:09d} {run} {run}" for number, run in enumerate(runs, 1))
    return facts(1, gpu=GPUS, claim=f"old 0 970 none {' '.join(GPUS[free:])}", ticket=tickets)


def wait(hosts: Sequence[SshHost], answers: Iterator[tuple[str, Output]], clock: Iterator[int]) -> list[Command]:
    """The commands of a wait on box1 and box2, which are answered in turn; polls of ``answers`` by their address."""
    names = {"box1": "zeta", "box2": "alpha"}  # their own
    known = [parse_facts(facts(1, name=names[host.address], gpu=GPUS)) for host in hosts]
    verb = wait_in_line(OPTIONS, replace(PLAN, uid="me", wait_s=60), hosts, known)
    said: list[Command] = []
    outputs: tuple[Output, ...] | None = None
    while True:
        try:
            commands = next(verb) if outputs is None else verb.send(outputs)
        except StopIteration:
            return said
        said += commands
        outputs = ()
        for command in commands:
            if command.mode == "hold":
                outputs += (Output(returncode=0, stdout="000000002\n"),)
            elif command.host is None:
                outputs += (Output(returncode=0, stdout=f"{next(clock)}\n"),)
            else:
                address, answer = next(answers)
                assert command.host.address == address
                outputs += (answer,)


def test_every_launch_takes_its_tickets_in_one_order(wording: Wording) -> None:
    """By the hosts' own names, whatever the order of the file; the second one when it is the first in line."""
    for hosts in (BOXES[:2], BOXES[1::-1]):
        answers = iter(
            [
                ("box2", line("you", "me", free=0)),
                ("box2", line("me", free=1)),
                ("box2", line("me", "late")),
                ("box2", line("me", "late")),
                ("box1", line("me")),
            ]
        )
        said = wait(hosts, answers, iter(range(9)))
        assert [command.host.address for command in said if command.mode == "hold" and command.host] == ["box2", "box1"]
        for command in said:
            if command.say:
                wording(command.say)


def test_who_waits_behind_is_not_in_the_way() -> None:
    fact = parse_facts(line("you", "me", "late"))
    assert (fact.ahead("me"), fact.ahead("you"), fact.ahead("none")) == (("you",), (), ("you", "me", "late"))


def test_a_wait_ends(wording: Wording) -> None:
    busy = iter([("box2", line("you", "me", free=0))] * 9)
    with pytest.raises(UnavailableError) as error:
        wait(BOXES[:2], busy, iter((0, 59, 61)))
    wording(error.value)
    with pytest.raises(UnavailableError) as error:
        wait(BOXES[:2], iter([("box2", DEAD)]), iter((0,)))
    wording(error.value)


def shown(state: str | None) -> Output:
    node = "null" if state is None else f'{{"run": "night", "node": 0, "pid": 1, "state": "{state}", "started": 1.0}}'
    return Output(returncode=0, stdout=f'{{"alive": true, "node": {node}, "outcome": null, "history": ""}}')


@pytest.mark.parametrize(
    ("first", "second", "moves"),
    [
        pytest.param(shown("rendezvous"), DEAD, True, id="lost"),
        pytest.param(shown("training"), DEAD, False, id="only-we-do-not-reach-it"),
        pytest.param(DEAD, shown("rendezvous"), False, id="node-0"),
        pytest.param(shown("rendezvous"), shown(None), False, id="starting"),
    ],
)
def test_a_lost_node_starts_on_a_spare(first: Output, second: Output, moves: bool, wording: Wording) -> None:
    run = replace(RUN, handle={"hosts": [0, 1], "port": "61000", "address": "10.0.0.1", "device": "cpu"})
    clocks = tuple(Output(returncode=0, stdout="1000\n") for _ in range(2))
    spares = [(DEAD, facts(4)), clocks, (SECRET,), (Output(returncode=0),)] if moves else []
    asked, moved = play(SshTarget(OPTIONS).replace_lost(run, PLAN), [(first, second), *spares])
    assert moved.nodes == ((1,) if moves else ())
    if moves:
        assert (moved.handle["hosts"], moved.handle["lost_hosts"]) == ([0, 3], [1])
        (start,) = asked[-1]
        assert start.host == BOXES[3].host
        assert "PET_NODE_RANK=1\nPET_MASTER_ADDR=10.0.0.1\nPET_MASTER_PORT=61000\n" in str(start.stdin)
        wording(moved.note)
    assert not SshTarget(replace(OPTIONS, hosts=BOXES[:2])).has_spares(run)
    (_, _, _), none = play(
        SshTarget(OPTIONS).replace_lost(run, PLAN),
        [(shown("rendezvous"), DEAD), (DEAD, DEAD), clocks[:1]],
    )
    assert none.nodes == ()
    wording(none.note)
