"""Which hosts a launch takes: spares, excluded hosts, those of a resumed run's checkpoints, and the queue for GPUs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl import ssh_answers
from tests.unit.ddpctl.answers import matching, only, perform
from tests.unit.ddpctl.ssh_answers import ANSWERS, FACTS, GPUS, RUN, START, by_host, facts

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import UnavailableError
from ddpctl.job.launch_plan import Plan
from ddpctl.targets.ssh.host_choice import Choice, choose, wait_in_line
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import Facts, host_report, parse_facts
from ddpctl.targets.ssh.target import SshTarget

BOXES = tuple(SshHost(address=f"box{number}") for number in (1, 2, 3, 4))
OPTIONS = SshOptions(hosts=BOXES)
PLAN = replace(ssh_answers.PLAN, uid="12ab")
DEAD = Output(returncode=255, stderr="no route to host\n")


def chosen(plan: Plan, options: SshOptions = OPTIONS, **answers: Output) -> tuple[Choice, list[str]]:
    """The choice where the hosts answer that, and the hosts that were asked; those that are not named are ready."""
    commands: list[str] = []

    def look(hosts: Sequence[SshHost]) -> Verb[tuple[Facts, ...]]:
        commands.extend(host.address for host in hosts)
        yield ()
        return tuple(parse_facts(answers.get(host.address, facts(1))) for host in hosts)

    verb = choose(options, plan, look)
    try:
        while True:
            next(verb)
    except StopIteration as stop:
        return stop.value, commands


def test_spares_get_hosts_as_nodes_do_and_a_launch_without_them_is_refused() -> None:
    plan = replace(PLAN, job=replace(PLAN.job, spares=1))
    choice, _ = chosen(plan, box2=DEAD)
    assert (choice.numbers, choice.nodes(plan.job)) == ((0, 2, 3), "2")
    with pytest.raises(UnavailableError):
        chosen(plan, box2=DEAD, box3=DEAD)


def test_hosts_with_their_own_numbers_of_gpus_keep_their_order() -> None:
    two_gpus, one_gpu = (facts(1, gpu=tuple(f"GPU-{index}" for index in range(number))) for number in (2, 1))
    plan = replace(PLAN, job=replace(PLAN.job, gpus=(2, 1), device="cuda"))
    has = {"box1": two_gpus, "box2": one_gpu, "box3": one_gpu, "box4": two_gpus}
    assert chosen(plan, **has)[0].numbers == (0, 1)
    assert chosen(plan, **has | {"box1": DEAD})[0].numbers == (3, 1)  # box3 has too few for node 0
    assert chosen(plan, **has | {"box2": DEAD})[0].numbers == (0, 3)
    elastic = replace(plan, job=replace(plan.job, nodes="1:2"))
    with pytest.raises(UnavailableError):
        chosen(elastic, **has | {"box1": DEAD, "box4": DEAD})


def test_the_first_hosts_are_taken_and_a_dead_or_excluded_one_is_passed_over() -> None:
    choice, commands = chosen(PLAN)
    assert (choice.numbers, choice.notes, commands) == ((0, 1), (), ["box1", "box2"]), "no spare is asked"
    elastic = replace(PLAN, job=replace(PLAN.job, nodes="1:2"))
    assert chosen(elastic, box2=DEAD, box3=DEAD, box4=DEAD)[0].numbers == (0,)
    choice, commands = chosen(PLAN, box2=DEAD)
    assert (choice.numbers, commands) == ((0, 2), ["box1", "box2", "box3", "box4"])
    (note,) = choice.notes
    assert ("box2" in note, "no route to host" in note) == (True, True)
    assert chosen(PLAN, replace(OPTIONS, exclude=("box1", "box3")))[0].numbers == (1, 3)


AGAIN = replace(PLAN, name="night-2", folder="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
COPIES = {
    "box2": facts(2, checkpoint="z.pt", copy='{"step": 30}'),
    "box4": facts(4, checkpoint="a.pt", copy='{"step": 40}'),
}


def test_a_resumed_run_is_where_its_checkpoints_are() -> None:
    assert chosen(replace(AGAIN, checkpoint_dir="box3:~/c"))[0].numbers == (2, 0)
    shared = replace(OPTIONS, checkpoint_dir="/nfs")
    assert chosen(AGAIN, shared, box1=DEAD)[0].numbers == (1, 2)


@pytest.mark.parametrize(
    ("gpus", "holder", "dead", "numbers"),
    [
        pytest.param((2, 1), "box1", (), (0, 1), id="node-0"),
        pytest.param((2, 1), "box4", (), (3, 1), id="spare-whose-predecessor-is-back"),
        pytest.param((2, 2, 1), "box2", (), (1, 0, 2), id="equal-hosts-change-places"),
        pytest.param((2, 1), "box2", (), None, id="too-few-gpus-for-node-0"),
        pytest.param((2, 1), "", (), (0, 1), id="shared"),
    ],
)
def test_a_resumed_run_keeps_the_order_of_hosts_with_their_own_numbers_of_gpus(
    gpus: tuple[int, ...], holder: str, dead: tuple[str, ...], numbers: tuple[int, ...] | None
) -> None:
    job = replace(PLAN.job, nodes=str(len(gpus)), gpus=gpus, device="cuda")
    plan = replace(AGAIN, job=job, checkpoint_dir=f"{holder}:~/c")
    counts = {"box1": gpus[0], "box2": gpus[1], "box3": gpus[2] if len(gpus) > 2 else 2, "box4": 2}
    has = {box: facts(1, gpu=tuple(f"GPU-{index}" for index in range(count))) for box, count in counts.items()}
    options = OPTIONS if holder else replace(OPTIONS, checkpoint_dir="/nfs")
    if numbers is None:
        with pytest.raises(UnavailableError) as error:
            chosen(plan, options, **has | dict.fromkeys(dead, DEAD))
        assert_names(f"{error.value} {error.value.hint}", holder, "checkpoint_dir")
        stored = replace(plan, job=replace(job, checkpoint_dir="s3://bucket/night"))
        if not dead:
            choice, _ = chosen(stored, **has)
            assert choice.numbers == (0, 1)
            assert_names(choice.notes[0], holder, "s3://bucket/night")
    else:
        assert chosen(plan, options, **has | dict.fromkeys(dead, DEAD))[0].numbers == numbers


@pytest.mark.parametrize("cut_copy", [False, True])
def test_a_resumed_run_whose_host_is_dead_starts_from_the_newest_complete_copy(cut_copy: bool) -> None:
    """A copy that was cut has no manifest: it is not a checkpoint, and the steps that it had are named."""
    cut = {"box3": facts(3, announced='{"step": 50}')} if cut_copy else {}
    choice, _ = chosen(AGAIN, box1=DEAD, **COPIES, **cut)
    assert choice.numbers == (3, 1)
    assert ("step 40" in choice.notes[0], "box4" in choice.notes[0]) == (True, True)
    assert ("41 to 50" in choice.notes[0]) == cut_copy


@pytest.mark.parametrize(
    ("options", "first", "cause"),
    [(OPTIONS, DEAD, "no route to host"), (replace(OPTIONS, exclude=("box1",)), facts(1), "excluded")],
)
def test_a_resumed_run_whose_checkpoints_are_nowhere_is_refused(options: SshOptions, first: Output, cause: str) -> None:
    with pytest.raises(UnavailableError) as error:
        chosen(AGAIN, options, box1=first)
    assert [fact in str(error.value) for fact in (RUN.checkpoint_dir, cause, "--resume")] == [True] * 3


def line(*runs: str, free: int = 3) -> Output:
    tickets = tuple(f"{number:09d} {run} {run}" for number, run in enumerate(runs, 1))
    return facts(1, gpu=GPUS, claim=f"old 0 970 none {' '.join(GPUS[free:])}", ticket=tickets)


def wait(
    hosts: Sequence[SshHost], polls: Mapping[str, Iterable[Output]], clock: Iterable[int] = itertools.count(1000)
) -> list[Command]:
    """The commands of a wait for the hosts, each of which answers its polls in turn."""
    names = {"box1": "zeta", "box2": "alpha"}  # their own
    known = [parse_facts(facts(1, name=names[host.address], gpu=GPUS)) for host in hosts]
    verb = wait_in_line(OPTIONS, replace(PLAN, uid="me", wait_s=60), hosts, known)
    times, remaining = iter(clock), {address: iter(outputs) for address, outputs in polls.items()}

    def reply(command: Command) -> Output:
        if command.mode == "hold":
            return Output(returncode=0, stdout="000000002\n")
        assert command.host is not None
        answer = next(remaining[command.host.address])
        return replace(answer, stdout=f"now {next(times)}\n{answer.stdout}")

    commands, _ = perform(verb, {"": reply})
    return commands


@pytest.mark.parametrize("hosts", [BOXES[:2], BOXES[1::-1]])
def test_every_launch_takes_its_tickets_in_one_order(hosts: Sequence[SshHost]) -> None:
    """By the hosts' own names, whatever the order of the file; the second one when it is the first in line."""
    box2 = [line("you", "me", free=0), line("me", free=1), line("me", "late"), line("me", "late")]
    commands = wait(hosts, {"box2": box2, "box1": [line("me")]})
    assert [str(command.host) for command in commands if command.mode == "hold"] == ["box2", "box1"]
    behind, first = [command.say for command in commands if command.say]
    assert [fact in behind for fact in ("box2", "2 of 2", "'you'", "0 of 3", "'old'")] == [True] * 5
    assert [fact in first for fact in ("box2", "1 of 1", "'you'", "1 of 3", "'old'")] == [True, True, False, True, True]


def test_who_waits_behind_is_not_in_the_way() -> None:
    fact = parse_facts(line("you", "me", "late"))
    assert (fact.ahead("me"), fact.ahead("you"), fact.ahead("none")) == (("you",), (), ("you", "me", "late"))


def test_a_report_names_the_node_that_uses_a_gpu_and_fails_where_that_is_unknown() -> None:
    first, *_ = host_report(BOXES[0], facts(1, gpu=GPUS, claim="night 1 970 none GPU-0")).gpus
    assert (first.run, first.node, first.since) == ("night", 1, 970)
    assert host_report(BOXES[0], facts(1, gpu=GPUS, claims_error="locked")).failure == "locked"


def test_a_wait_ends_after_its_time() -> None:
    with pytest.raises(UnavailableError) as error:
        wait(BOXES[:2], {"box2": [line("you", "me", free=0)] * 9}, clock=(1000, 1059, 1061))
    assert [fact in str(error.value) for fact in ("60 s", "box2", "'you'", "0 of 3", "--wait")] == [True] * 5


def shows(state: str | None) -> Output:
    node = "null" if state is None else f'{{"run": "night", "node": 0, "pid": 1, "state": "{state}", "started": 1.0}}'
    return Output(returncode=0, stdout=f'{{"alive": true, "node": {node}, "outcome": null, "history": ""}}')


ON_TWO = replace(RUN, handle={"hosts": [0, 1], "port": "61000", "address": "10.0.0.1", "device": "cpu"})
STATE = "node.json"  # a part of the script that shows the state of a node


def test_a_lost_node_starts_on_a_spare() -> None:
    target, with_spares = SshTarget(OPTIONS), replace(ON_TWO, job=replace(ON_TWO.job, spares=1))
    assert (target.has_spares(ON_TWO), target.has_spares(with_spares)) == (True, False)
    states, spares = by_host(shows("rendezvous"), DEAD), {"box3": DEAD, "box4": facts(4, gpu=GPUS)}
    commands, moved = perform(target.replace_lost(ON_TWO), {FACTS: spares, **ANSWERS, STATE: states})
    assert (moved.nodes, moved.handle["hosts"], moved.handle["lost_hosts"]) == ((1,), [0, 3], [1])
    start = only(commands, START)
    assert start.host == BOXES[3].host
    assert "PET_NODE_RANK=1\nPET_MASTER_ADDR=10.0.0.1\nPET_MASTER_PORT=61000\n" in str(start.stdin)
    assert "DDP_DEVICE=cpu" in str(start.stdin), "as the run was launched"
    assert [fact in moved.note for fact in ("node 1", "box4", "box2")] == [True] * 3
    again = replace(ON_TWO, handle={**ON_TWO.handle, "lost_hosts": [2]})
    _, moved = perform(target.replace_lost(again), {FACTS: spares, **ANSWERS, STATE: states})
    assert moved.handle["lost_hosts"] == [2, 1]
    assert [str(host) for host, _ in target.roots(replace(ON_TWO, handle=moved.handle))] == [
        "box1",
        "box4",
        "box3",
        "box2",
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(shows("training"), DEAD, id="only-we-do-not-reach-it"),
        pytest.param(DEAD, shows("rendezvous"), id="node-0"),
        pytest.param(shows("rendezvous"), shows(None), id="starting"),
    ],
)
def test_no_node_moves_unless_node_0_waits_for_it(first: Output, second: Output) -> None:
    answers = {FACTS: facts(4), **ANSWERS, STATE: by_host(first, second)}
    commands, moved = perform(SshTarget(OPTIONS).replace_lost(ON_TWO), answers)
    assert (moved.nodes, matching(commands, START)) == ((), [])
