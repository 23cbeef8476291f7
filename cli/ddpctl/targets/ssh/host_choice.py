"""Chooses the hosts of a launch: the first hosts in the target's list that are ready. All other hosts are spares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from ddpctl.command import Command, Verb, sh
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.preflight import CLOCK_S, NO_ERROR, Facts, GpusTakenError, Judgement, judge, parse_facts
from ddpctl.text import counted, format_duration, one_line
from ddpwire.run_files import CHECKPOINTS

TAKE_S = 90.0  # time limit for creating a ticket, longer than claims.MUTEX_S
POLL_S = 45.0
Look = Callable[[Sequence[SshHost]], Verb[tuple[Facts, ...]]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The hosts of a launch, one per node."""

    numbers: tuple[int, ...]  # positions in the target's list of hosts
    hosts: tuple[SshHost, ...]
    facts: tuple[Facts, ...]
    cuda: bool  # whether the ranks use GPUs
    rows: tuple[str, ...] = ()  # a table of all checked hosts
    notes: tuple[str, ...] = ()  # messages for the user
    machines: Mapping[str, Any] = field(default_factory=dict)  # Judgement.machines, if a host is not ready

    def nodes(self, job: JobSpec) -> str:
        """Return the number of nodes as ``N`` or ``MIN:MAX``. MAX is the number of hosts."""
        most = len(self.hosts) - job.spares
        return str(most) if job.min_nodes >= most else f"{job.min_nodes}:{most}"


def is_resumed(plan: Plan) -> bool:
    """Return whether the run resumes from the checkpoints of an earlier run (``checkpoint_dir`` is ``HOST:PATH``)."""
    return plan.checkpoint_dir != str(PurePath(plan.folder) / CHECKPOINTS)


def candidates(options: SshOptions, plan: Plan) -> tuple[int, ...]:
    """Return the positions of the hosts that are not excluded.

    If the run resumes, the host whose disk has the checkpoints comes first, unless the nodes have their own numbers of
    GPUs. Raises ConfigError if the options are wrong for the job, for example if too few hosts remain.
    """
    for _, text in options.problems(plan.job):
        raise ConfigError(f"--nodes: {text}")
    numbers = [number for number, host in enumerate(options.hosts) if host.address not in options.exclude]
    return tuple(sorted(numbers, key=lambda number: not plan.job.is_uneven and number != _holder(options, plan)))


def _holder(options: SshOptions, plan: Plan) -> int | None:
    """Return the position of the host that has the checkpoints of a resumed run on its disk, or None."""
    if not is_resumed(plan) or options.checkpoint_dir:
        return None
    holders = (n for n, host in enumerate(options.hosts) if plan.checkpoint_dir.startswith(f"{host.address}:"))
    return next(holders, None)


def choose(options: SshOptions, plan: Plan, look: Look, *, dry_run: bool = False) -> Verb[Choice]:
    """Check the hosts with ``look``, and return one ready host per node. Wait for GPUs if the plan says so.

    Spare hosts are checked only if they may be needed. Raises DdpctlError if too few hosts are ready.

    If the nodes have their own numbers of GPUs, host N is node N. A spare host, which has the largest number, replaces
    a host that is not ready. If the run resumes, the host that has the checkpoints is node 0 instead of host 0. This
    host needs as many GPUs as node 0 at its own place in the list.
    """
    order, job = candidates(options, plan), plan.job
    hosts = [options.hosts[number] for number in order]
    facts = yield from look(hosts[: job.max_machines])
    checked = judge(options, plan, hosts[: len(facts)], facts)
    holder = next((place for place, number in enumerate(order) if number == _holder(options, plan)), None)
    if (any(checked.wrong) or (holder or 0) >= len(facts)) and len(hosts) > len(facts):
        facts += yield from look(hosts[len(facts) :])
        checked = judge(options, plan, hosts, facts)
    places = range(len(facts))
    ready = [place for place in places if not checked.kinds(place)]
    waits = plan.wait_s is not None and checked.cuda
    taken = [place for place in places if checked.kinds(place) == {GpusTakenError}] if waits else []
    usable = sorted(ready + taken, key=lambda place: (place != holder, place in taken, place))
    least = job.max_machines if job.is_uneven else job.min_nodes + job.spares
    if len(usable) < least:
        raise checked.refusal(need=least, dry_run=dry_run)
    first, notes = _with_checkpoints(options, plan, checked, usable, holder)
    if job.is_uneven:
        chosen = _in_order(job, usable, first)
        if len(chosen) < job.max_machines:  # only possible with ``first``
            address = hosts[first or 0].address
            where = f"the checkpoints are on {address}, but with it as node 0 a node has no host with enough GPUs"
            if not job.checkpoint_dir:
                hint = f"list {address} first, with its number of GPUs first in gpus, or share checkpoint_dir"
                raise UnavailableError(f"nothing was started: {where}", hint=hint)
            notes.append(f"{where}: the run continues from {job.checkpoint_dir}")
            chosen = _in_order(job, usable, None)
    else:
        usable.sort(key=lambda place: place != first)
        chosen = usable[: max(least, min(job.max_machines, len(ready)))]
    unused = [place for place in places if place not in chosen and checked.kinds(place)]
    notes += [one_line(f"{hosts[place].address} is not used: {checked.why(place)}") for place in unused]
    at = [hosts[place] for place in chosen]
    facts, rows = tuple(facts[place] for place in chosen), checked.rows
    if waits:
        yield from wait_in_line(options, plan, at, facts)
        again = judge(options, plan, at, (yield from look(at)))
        if any(again.wrong):
            raise again.refusal(need=len(at))
        facts, rows = again.facts, again.rows
    clocks = (
        f"{host.address}: its clock differs from this machine's by {fact.clock_s:+.0f} s"
        for host, fact in zip(at, facts, strict=True)
        if fact.clock_s is not None and abs(fact.clock_s) > CLOCK_S
    )
    return Choice(
        numbers=tuple(order[place] for place in chosen),
        hosts=tuple(at),
        facts=facts,
        cuda=checked.cuda,
        rows=rows,
        notes=(*clocks, *notes),
        machines=checked.machines if any(checked.wrong) else {},
    )


def _in_order(job: JobSpec, usable: Sequence[int], first: int | None) -> list[int]:
    """Return the place of each node's host, if the nodes have their own numbers of GPUs.

    ``first`` is the place of node 0's host, if its disk has the checkpoints. Return fewer places if a node has no host.
    """
    places = {node: [node] for node in range(job.max_machines) if node in usable and node != first}
    places |= {} if first is None else {0: [first]}
    others = [place for place in usable if [place] not in places.values()]
    chosen: list[int] = []
    for node in range(job.max_machines):
        free = (place for place in places.get(node, others) if place not in chosen)
        chosen += [place for place in free if job.gpus_of(place) >= job.gpus_of(node)][:1]
    return chosen


def _with_checkpoints(
    options: SshOptions, plan: Plan, checked: Judgement, usable: Sequence[int], holder: int | None
) -> tuple[int | None, list[str]]:
    """Return the place of the host that has to be node 0 of a run that resumes, and a list of notes for the user.

    If the hosts do not share the checkpoints, it is the ``holder``, to which they were saved. If that host cannot be
    used, it is the host with the newest copy. If no other host has a copy, UnavailableError is raised. None: any host.
    """
    if not is_resumed(plan) or options.checkpoint_dir:
        return None, []
    having = [place for place in usable if checked.facts[place].get("checkpoint")]
    if holder in usable and (holder in having or not having):
        return holder, []
    reason = "their host is excluded" if holder is None else "that folder has none now"
    if holder is not None and checked.wrong[holder]:
        reason = f"their host is not ready ({checked.why(holder)})"
    where = one_line(f"the checkpoints were saved to {plan.checkpoint_dir}, but {reason}")
    if plan.job.checkpoint_dir:
        return None, [f"{where}: the run continues from {plan.job.checkpoint_dir}"]
    if not having:
        hint = "make their host available, or leave out --resume; next time, use checkpoint_copies or a shared folder"
        raise UnavailableError(f"nothing was started: {where}, and no other host has checkpoints", hint=hint)
    best = max(having, key=lambda place: (checked.facts[place].step("copy"), checked.facts[place].get("checkpoint")))
    fact, address = checked.facts[best], checked.hosts[best].address
    step, announced = fact.step("copy"), max(checked.facts[place].step("announced") for place in usable)
    source = f"{fact.get('checkpoint')} of {address}, a checkpoint that may be older"
    if step:
        source = f"the copy of step {step} on {address}"
    if announced > step:
        source += f". The checkpoint of step {announced} was not copied completely, "
        source += f"so steps {step + 1} to {announced} are lost"
    return best, [one_line(f"{where}: the run continues from {source}")]


# Waiting: a launch takes a ticket on one host after another, in the order of the names that the hosts report. It takes
# the next ticket only when it is first in the queues of all earlier hosts. So two launches never wait for each
# other, even if their files list the hosts in different orders or under different names.


def wait_in_line(options: SshOptions, plan: Plan, hosts: Sequence[SshHost], facts: Sequence[Facts]) -> Verb[None]:
    """Wait until the launch is first in the queue of every host, and every host has enough free GPUs.

    Raises UnavailableError. The tickets of the launch are removed when the verb ``submit`` ends.
    """
    order = sorted(range(len(hosts)), key=lambda place: (facts[place].get("name"), hosts[place].address))
    folder, poll = scripts.claims_folder(options.home), f"sleep 1\n{scripts.gpus_text(options)}\nsay end yes\n"
    tickets: list[int] = []
    started, waiting = 0, ""
    while waiting or len(tickets) < len(hosts):
        if not waiting:
            host = hosts[order[len(tickets)]]
            text = claims.take_ticket(folder, plan.name, plan.uid)
            (took,) = yield (Command(argv=("/bin/sh",), stdin=text, host=host.host, mode="hold", timeout_s=TAKE_S),)
            if took.returncode or not took.stdout.strip().isdecimal():
                raise UnavailableError(f"cannot join the queue of {host.address}: {took.last_line(NO_ERROR)}")
            tickets.append(int(took.stdout))
        say = waiting and f"  waiting for {waiting}"
        answers = yield tuple(
            sh(hosts[place].host, claims.renew(folder, number) + poll, timeout_s=POLL_S, say=say)
            for place, number in zip(order, tickets, strict=False)
        )
        polled = [parse_facts(answer) for answer in answers]
        lines = [_waits_for(plan, hosts[place], fact, place) for place, fact in zip(order, polled, strict=False)]
        waiting, now = next(filter(None, lines), ""), polled[0].number("now")
        started = started or now
        if waiting and now >= started + (plan.wait_s or 0):
            message = f"the wait for free GPUs ended after {format_duration(plan.wait_s or 0)} ({waiting})"
            raise UnavailableError(f"nothing was started: {message}", hint="use a longer --wait, or see ddpctl hosts")


def _waits_for(plan: Plan, host: SshHost, fact: Facts, node: int) -> str:
    """Return a message about what the launch waits for on the host of a node, or "" if it can start there.

    Raises UnavailableError if the launch is no longer in the host's queue.
    """
    if all(uid != plan.uid for _, uid in fact.tickets):
        reason = fact.failure or "the host removed it"
        raise UnavailableError(f"nothing was started: the place in the queue of {host.address} was lost ({reason})")
    ahead = fact.ahead(plan.uid)
    free, need = len(fact.free_gpus), plan.job.gpus_of(node)
    if not ahead and free >= need and not fact.get("claims_error"):
        return ""
    line = f"place {len(ahead) + 1} of {len(fact.tickets)} in the queue"
    after = f", after {_runs(ahead)}" if ahead else ""
    runs = tuple(dict.fromkeys(claim.run for claim in fact.claims if claim.gpus))
    has = f"; GPUs are in use by {_runs(runs)}" if runs else ""
    return one_line(
        f"{host.address}: {line}{after}; {counted(need, 'GPU')} needed, {free} of {len(fact.gpus)} free{has}"
    )


def _runs(names: Sequence[str]) -> str:
    return f"run{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
