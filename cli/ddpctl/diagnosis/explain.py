"""Explains why a run hangs, is slow or has failed, with one sentence and its evidence. Has no side effects.

The sources are, in this order: the outcome, the process states, the collectives that torch's flight recorder has
recorded, and the Python stacks.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from ddpctl.diagnosis.rank_view import (
    COLLECTIVES,
    DEFAULT_GROUP,
    LOADER,
    MIN_WAIT_S,
    PACES,
    Collective,
    RankView,
    has_file,
    place_of,
)
from ddpctl.text import format_duration, one_line
from ddpwire import communication
from ddpwire.events import Event
from ddpwire.exits import STOPPED, Exit
from ddpwire.machine import enumerate_ranges
from ddpwire.run_files import COLLECTIVE_TIMEOUT, Outcome

Cause = Literal[
    "none",  # the ranks continue, or the run ended well
    "failed",  # a rank failed first, or the run could not start, as the outcome reports
    "node_lost",
    "oom",
    "stopped_process",  # a rank is stopped by a signal
    "ended_early",  # a rank has ended while others wait for it
    "mismatch",  # ranks called different collectives, or with different sizes or types, or have different models
    "network",  # data between two nodes is lost or slow
    "order",  # ranks wait for each other in collectives of different groups
    "missing",  # a rank has not entered a collective
    "send_recv",  # all ranks wait in send or recv
    "no_group",  # a rank has not created the process group
    "data_loader",  # one rank, or all ranks, wait for their data
    "unused_parameters",  # DDP waits for gradients that never arrive
    "nan",  # a loss or a gradient is not finite
    "resumed_apart",  # ranks have resumed from different checkpoints
    "disk_full",
    "checkpoint",  # a rank is saving while others wait
    "straggler",
    "unknown",
]
HANG_S = 30.0  # a shorter wait is not reported as a hang
# A warning of torch if the address of a node has no name (docs/explain.md).
HARMLESS = re.compile(r"^.*\[c10d\] The hostname of the client socket cannot be retrieved\. err=.*\n?", re.MULTILINE)
MAX_NAMED = 3  # ranks of which a sentence tells what they did
MAX_VERSIONS = 20  # of packages that are not the same on all nodes
LOG_LINES = 5  # how many lines at the end of the failed rank's log are shown
NOT_YET = f". A wait of less than {HANG_S:g} s may be normal: a download, an evaluation or a checkpoint can cause it"
NOT_BLOCKED = "is not blocked: it may be running an evaluation or polling in a loop"
RESENT = 4  # how often TCP sends data again within 3 s if nothing is acknowledged
SLOWER = 2.0  # the time between two collectives, compared with the beginning
STARTUP = 10  # collectives of DDP before and in the first step, which are closer together than those of later steps
MIN_SILENCE_S, MIN_VOLUME = 10.0, 1e6  # seconds and bytes; less is not mentioned
STRAGGLER_SHARE = 0.2  # share of the time in which only a straggler has not entered a collective
STRAGGLER_LAST, MIN_COLLECTIVES = 0.8, 10  # share of the collectives in which a straggler is last
MOSTLY, BUSY_LINK = 0.5, 0.8  # shares of the samples
MAX_SHARE = 0.95  # of a step for communication; samples cannot show more
SAME_SIZES = ("all_reduce", "broadcast", "reduce")  # each rank's input has the same size
SEND_RECV = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An explanation. ``fault`` is False if nothing is wrong, or if a hang is not certain yet."""

    cause: Cause
    sentence: str
    fault: bool = True
    rank: int | None = None  # the rank that caused it; None: no single rank
    node: int | None = None  # the node of that rank
    evidence: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def explain_outcome(
    outcome: Outcome, kept: Sequence[RankView], log: str | None, events: Sequence[Event], world_size: int
) -> Explanation:
    """Explain how a run ended.

    ``kept`` describes the ranks before they were killed because of a hang or a time-out. ``log`` is the end of the log
    of the failed rank, or of the lost node. It is None if there is no log.
    """
    has_log, log = log is not None, HARMLESS.sub("", log or "")
    if outcome.cause == "hang" and kept:
        explanation = explain_ranks(kept, world_size)
        if explanation.cause not in ("none", "unknown"):
            sentence = explanation.sentence.partition(NOT_YET)[0]
            return replace(explanation, sentence=f"{sentence}; the run was killed because of this hang", fault=True)
        unknown = ("why the run hung: " + explanation.sentence, *explanation.unknown)
        return replace(explanation, cause="unknown", sentence=outcome.message, fault=True, unknown=unknown)
    cause: Cause = "none" if outcome.code == 0 else _OWN_CAUSES.get(outcome.cause, "failed")
    unknown = tuple(filter(None, [_UNKNOWN.get(outcome.cause)]))
    sentence, rank, node = outcome.message, outcome.rank, outcome.node
    text = f"{outcome.message}\n{last_error(log)}"
    known = next((entry[1:] for entry in KNOWN_ERRORS if entry[0].search(text)), None)
    if cause == "failed" and known:
        cause, meaning = known
        sentence += f"; {meaning}"
        if cause in ("mismatch", "unused_parameters"):  # it is not known which rank caused it
            rank = node = None
    elif cause == "failed" and COLLECTIVE_TIMEOUT.search(f"{text}\n{log}") and (absent := _outside(kept, outcome)):
        cause, rank, node = "missing", absent[0].rank, absent[0].node
        doing = "; ".join(f"{view.who} {view.doing}" for view in absent[:MAX_NAMED])
        more = f"; and {len(absent) - MAX_NAMED} more" * (len(absent) > MAX_NAMED)
        sentence += f"; {_ranks([view.rank for view in absent], 'was', 'were')} in no collective then: {doing}{more}"
    elif cause == "failed" and LOST_PEER.search(outcome.message):
        if early := _ended_before(events, outcome):
            cause, rank, node = "ended_early", early.rank, early.node
            sentence += f"; other ranks waited for rank {rank} (node {node}), which had exited with 0"
        else:
            sentence += "; its connection to another rank was lost, but no other rank is known to have ended earlier"
    for report in explain_events(events):
        sentence += f"; {report.sentence}"
        if outcome.code == Exit.DATA and report.cause == "nan":
            cause, rank, node = report.cause, report.rank, report.node
    stopped = outcome.cause == "stopped" and outcome.code in STOPPED  # the rank's last lines do not explain the end
    evidence = _log_evidence(outcome, log, has_log=has_log) if outcome.code and not stopped else []
    return Explanation(
        cause=cause, sentence=one_line(sentence), fault=outcome.code != 0, rank=rank, node=node,
        evidence=tuple(evidence), unknown=unknown,
    )  # fmt: skip


def _outside(kept: Sequence[RankView], outcome: Outcome) -> list[RankView]:
    """Return the ranks that were in no collective when a rank's collective had timed out, as their stacks show."""
    others = [view for view in kept if view.rank != outcome.rank and not view.has_ended and any(view.stacks)]
    return [view for view in others if not view.waits_in and not view.share(COLLECTIVES)]


def _log_evidence(outcome: Outcome, log: str, *, has_log: bool) -> list[str]:
    """Return the place where the error was raised, and the last lines of the log."""
    if has_log and outcome.rank is not None and not log.strip():
        return [f"the log of rank {outcome.rank} has no traceback"]
    lines = [*map(one_line, log.splitlines()[-LOG_LINES:])]
    frames = [(file, int(line), name) for file, line, name in FRAME.findall(last_error(log))]
    place = place_of(frames[::-1]) if lines and outcome.cause != "node_lost" else ""
    return [f"raised at {place}", *lines] if place else lines


_OWN_CAUSES: Mapping[str, Cause] = {"oom": "oom", "node_lost": "node_lost"}
_UNKNOWN = {
    "hang": "what the ranks did during the hang, because it was not recorded",
    "node_lost": "why the node did not respond",
}


def explain_events(events: Sequence[Event]) -> list[Explanation]:
    """Explain the faults of the last attempt that events report: NaN, and different checkpoints."""
    attempt = max((event.attempt for event in events), default=0)
    events = [event for event in events if event.attempt == attempt]
    apart = next((str(event.facts.get("message")) for event in events if event.event == "resumed_apart"), "")
    explanations = [Explanation(cause="resumed_apart", sentence=one_line(apart))] if apart else []
    return [*filter(None, [_not_finite(events)]), *explanations]


def explain_software(environments: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each version, such as that of a package, that is not the same on all nodes."""
    software = {
        node: {key: facts[key] for key in ("python", "NCCL", "image") if key in facts}
        | dict(word.split("==", 1) for word in facts.get("packages", "").split())
        for node, facts in sorted(environments.items())
        if facts
    }
    lines = []
    for name in sorted({name for versions in software.values() for name in versions}):
        nodes: dict[str, list[int]] = {}
        for node, versions in software.items():
            nodes.setdefault(versions.get(name, "not installed"), []).append(node)
        places = (f"{version} on node{'s' * (len(at) > 1)} {enumerate_ranges(at)}" for version, at in nodes.items())
        lines += [one_line(f"{name} is {', '.join(places)}")] if len(nodes) > 1 else []
    more = [f"{len(lines) - MAX_VERSIONS} other versions differ"] if len(lines) > MAX_VERSIONS else []
    return lines[:MAX_VERSIONS] + more


def _not_finite(events: Sequence[Event]) -> Explanation | None:
    """Explain where NaN or infinity was first reported. Return None if it was not reported."""
    reports = [event for event in events if event.event == "not_finite"]
    complete = [event for event in reports if None not in (event.step, event.rank)]
    if not complete:
        return None
    first = min(complete, key=lambda event: (event.step, event.rank))
    num_ranks = sum((event.attempt, event.step) == (first.attempt, first.step) for event in complete)
    who, more = f"rank {first.rank} (node {first.node})", f" (and of {num_ranks - 1} more)" * (num_ranks > 1)
    text = f"the {first.facts.get('what')} of {who}{more} is NaN or infinite, first reported in step {first.step}"
    rank, node = (first.rank, first.node) if num_ranks == 1 else (None, None)
    return Explanation(cause="nan", sentence=one_line(text), rank=rank, node=node)


# Error messages of libraries, each with the cause of the failure and a phrase that explains it to the user.
KNOWN_ERRORS: tuple[tuple[re.Pattern[str], Cause, str], ...] = (
    (re.compile(r"op\.preamble\.length <= op\.nbytes"), "mismatch",
     "the ranks called one collective with tensors of different sizes or types, or different collectives"),
    (re.compile(r"Expected to have finished reduction in the prior iteration"), "unused_parameters",
     "some parameters got no gradient in a step: DistributedDataParallel(..., find_unused_parameters=True)"),
    (re.compile(r"DDP expects same model across all ranks"), "mismatch", "the ranks have different models"),
    (re.compile(r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED"), "oom", "the GPU's memory is full"),
    (re.compile(r"No space left on device"), "disk_full",
     "a disk is full, or a limit such as that of inotify watches is reached"),
    (re.compile(r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal"), "data_loader",
     "a worker process of its data loader was killed by a signal, for example because the memory was full"),
    # If a worker ends while it hands over a tensor, the rank gets the error of the broken connection.
    (re.compile(r"DataLoader worker \(pid.*\) exited unexpectedly|in rebuild_storage_fd$", re.M), "data_loader",
     "a worker process of its data loader ended, for example because the dataset called sys.exit or it was killed"),
)  # fmt: skip


FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (\S+)$', re.M)  # of a traceback
CHAINED = re.compile(r"exception(, another exception occurred| was the direct cause of the following exception):\s*$")
LOST_PEER = re.compile(r"Connection (reset|closed) by peer|Connection closed by remote|Broken pipe")


def _ended_before(events: Sequence[Event], outcome: Outcome) -> Event | None:
    """Find the first rank that exited with 0 before the failed rank exited, in the same attempt.

    Return the event of its exit, or None if there is no such rank.
    """
    exits = [event for event in events if event.event == "rank_exited" and event.attempt == outcome.attempt]
    failed_at = next((event.time for event in exits if event.rank == outcome.rank), 0.0)
    return next((event for event in exits if event.facts.get("status") == 0 and event.time < failed_at), None)


def last_error(log: str) -> str:
    """Return the last traceback in a log, including its chained exceptions, or else the last line of the log.

    Earlier tracebacks belong to exceptions that were caught.
    """
    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", log).partition("Fatal Python error: ")[0]  # stacks of all threads follow
    *earlier, last = text.split("Traceback (most recent call last):")
    if not earlier:
        return text.rstrip().rpartition("\n")[2]
    for part in itertools.takewhile(CHAINED.search, reversed(earlier)):
        last = part + last
    return last


# ---- Each reason is a function that gets all ranks, and returns an explanation or None.


def explain_ranks(ranks: Sequence[RankView], world_size: int) -> Explanation:
    """Explain what the ranks do. If the run was killed because of a hang, explain what they did before the kill."""
    reasons = (_stopped, _network, _mismatch, _missing, _no_group, _straggler, _slow_data, _send_recv)
    explanation = next((explanation for reason in reasons if (explanation := reason(ranks, world_size))), None)
    absent = sorted({*range(world_size)} - {view.rank for view in ranks})
    unknown = [f"what rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} did: no answer"] if absent else []
    silent = [view for view in ranks if view.unknown and view.group_at]
    unknown += [f"which collectives {view.who} has entered: {view.unknown}" for view in silent]
    no_clock = sorted({view.node for view in ranks if not view.clock_is_known})
    if explanation and explanation.cause == "straggler" and no_clock:
        which = f"node{'s' * (len(no_clock) > 1)} {', '.join(map(str, no_clock))}"
        unknown.append(
            f"whether the clock of {which} agrees with node 0's: if it does not, another rank may be the last"
        )
        explanation = replace(explanation, fault=False)
    if explanation is None:
        answering = [view for view in ranks if any(view.stacks)]
        moves = any(len({*filter(None, view.stacks)}) > 1 or view.moved_lately for view in answering)
        busy = [view.rank for view in answering if view.busy]  # these may be in an endless loop
        if moves or (busy and len(busy) == len(ranks)):
            explanation = Explanation(cause="none", sentence=_progress(ranks, world_size, moves=moves), fault=False)
        else:
            text = "nothing that blocks them is found"
            if busy:
                text += f"; {_ranks(busy, 'uses', 'use')} CPU time, but it is unknown whether the training advances"
            explanation = Explanation(cause="unknown", sentence=text, fault=False)
    return replace(explanation, evidence=tuple(map(_line, ranks)), unknown=tuple(unknown))


def _progress(ranks: Sequence[RankView], world_size: int, *, moves: bool) -> str:
    """Describe ranks that do not delay each other: how often they enter collectives, and where their code is.

    ``moves`` is whether they are seen to advance. Otherwise they only use CPU time.
    """
    text = "the ranks make progress" if moves else "all ranks use CPU time; it is unknown whether the training advances"
    arrivals = _arrivals(ranks, world_size)
    times = [arrival[-1][0] for arrival in arrivals]
    if not any(view.group_at for view in ranks):
        text = "no rank is known to have called init_process_group"
    elif len(times) < MIN_COLLECTIVES:
        text += f"; too few collectives ({len(times)}) are recorded to find a slow rank"
    else:
        steps = times[STARTUP:] if len(times) >= STARTUP + MIN_COLLECTIVES else times
        num = len(steps) // 4
        first_s, last_s = (steps[num] - steps[0]) / num, (steps[-1] - steps[-1 - num]) / num
        last, count, *_ = _last(arrivals, {view.rank: view.rank for view in ranks})
        if count < STRAGGLER_LAST * len(times):
            text += f"; no rank is usually the last to enter a collective ({len(times)} recorded)"
        else:
            text += f"; rank {last} is the last to enter {count} of {len(times)} recorded collectives"
            text += ", but is not found to delay the others"
        if last_s > SLOWER * first_s and steps is not times:
            text += f"; they became slower: first {first_s:.2g} s per collective, now {last_s:.2g} s"
        if (ago_s := max(view.read_at for view in ranks) - times[-1]) > max(MIN_SILENCE_S, PACES * last_s):
            text += f"; the last collective began {format_duration(ago_s)} ago"
    stacks = [stack for view in ranks for stack in view.stacks if stack]
    places = Counter(map(place_of, stacks)).most_common(1)
    if places and places[0][0] and places[0][1] > MOSTLY * len(stacks):
        text += f"; their code is at {places[0][0]} in {places[0][1]} of {len(stacks)} samples"
    sizes = [collective.num_bytes for collective in ranks[0].collectives.values()] if ranks else []
    if sizes and sum(sizes) >= MIN_VOLUME * len(sizes):
        mean = f"{sum(sizes) / len(sizes) / 1e6:.1f} MB on average"
        text += f"; a collective has {mean}: see COMMUNICATION in ddpctl profile"
    return text


def _line(view: RankView) -> str:
    waits = view.waits_in
    since = f"; it entered {waits.name} {format_duration(max(0.0, view.read_at - waits.at))} ago" if waits else ""
    return f"{view.who}: it {view.doing}{since}"


def _stopped(ranks: Sequence[RankView], world_size: int) -> Explanation | None:  # noqa: ARG001
    stopped = [view for view in ranks if {state.get("state") for state in view.states} in ({"T"}, {"t"})]
    if not stopped:
        return None
    more = f", and {len(stopped) - 1} more" if len(stopped) > 1 else ""
    how = "by a signal (SIGSTOP): continue it with kill -CONT" if stopped[0].state == "T" else "by a debugger"
    return _about(stopped[0], "stopped_process", f"{stopped[0].who}{more} is stopped {how}")


def _network(ranks: Sequence[RankView], world_size: int) -> Explanation | None:
    """Find two nodes between which the network has failed or is slow.

    It has failed if data is sent again several times without an acknowledgment. It is slow if data is in transit in
    nearly all samples.
    """
    links = [(view, link) for view in ranks for state in view.states for link in state.get("links", ())]
    nodes = {here: f"node {view.node}" for view, (here, *_) in links}
    cut: set[frozenset[str]] = set()
    busy: Counter[tuple[int, frozenset[str]]] = Counter()
    for view, (here, peer, size, again) in links:
        if peer in nodes or len(ranks) < world_size:  # otherwise the other machine may not belong to this run
            pair = frozenset((nodes[here], nodes.get(peer, "another machine")))
            busy[view.rank, pair] += size > 0
            cut |= {pair} if again >= RESENT else set()
    joining = [view.read_at - view.group_at for view in ranks if view.group_at and not view.collectives]
    waited_s = max([for_s for *_, for_s in _waiting(ranks)] or joining or [0.0])
    is_cut = bool(cut) and waited_s > MIN_WAIT_S
    most = BUSY_LINK * max((len(view.states) for view in ranks), default=0)
    bad = cut if is_cut else {pair for (_, pair), count in busy.items() if count >= most}
    if not bad or (not is_cut and sum(bool(view.waits_in) for view in ranks) <= MOSTLY * len(ranks)):
        return None
    names = sorted(frozenset.intersection(*bad))
    pairs = [names if len(names) > 1 else [*names, f"{len(bad)} others"]] if names else sorted(map(sorted, bad))
    between = f"between {', and between '.join(' and '.join(pair) for pair in pairs)}"
    is_of_run = any("another machine" not in pair for pair in bad)
    text = (
        f"the ranks wait for the network: data was in transit {between} nearly every time ddpctl looked; "
        f"see ddpctl bench{_faster_ways(ranks, max(busy.values(), default=0), world_size)}"
    )
    if is_cut:
        cause = "it is unknown whether the other machine belongs to the run"
        if is_of_run:
            cause = "the cause is a link, a firewall or a machine, not a rank"
        text = f"data {between} is retransmitted, but not acknowledged: {cause}; ranks have been waiting for "
        text += format_duration(waited_s)
    return Explanation(cause="network", sentence=text, fault=is_cut and is_of_run and waited_s >= HANG_S)


def _faster_ways(ranks: Sequence[RankView], num_busy: int, world_size: int) -> str:
    """Return how much faster a step would be in other ways of communication, if the ranks wait in an all-reduce.

    In a share of the samples, data was in transit. This share of a step is taken for the exchange of the gradients.
    """
    if not any(view.waits_in and view.waits_in.op == "all_reduce" for view in ranks):
        return ""
    waiting = min(MAX_SHARE, num_busy / max(len(view.states) for view in ranks))
    shapes, (plain, *others) = [communication.MATRIX], communication.CANDIDATES
    sent = communication.sent_bytes(communication.exchanged_bytes(plain, shapes), world_size)
    link = communication.Link(num_ranks=world_size, latency_s=0.0, bytes_per_s=sent / waiting)
    seconds = {way: communication.step_seconds(way, shapes, link, compute_s=1 - waiting) for way in others}
    ways = ", ".join(f"{way} {1 / way_s:.2g} times" for way, way_s in seconds.items())
    return f" --advise. A step would be faster with ddptrain --communication (docs/slow_links.md): {ways}"


def _send_recv(ranks: Sequence[RankView], world_size: int) -> Explanation | None:
    """Find out whether the ranks wait in send, recv or a collective. If only one rank does not wait, name it.

    This uses only the Python stacks, because gloo does not record how long a rank waits in send or recv.
    """
    waiting = [view for view in ranks if view.share(COLLECTIVES, SEND_RECV) == 1]
    others = [view for view in ranks if view not in waiting and not view.waits_in]
    if not waiting or len(ranks) < world_size or len(others) > 1 or any(view.runs for view in ranks):
        return None
    if others:
        text = f"{others[0].who} is the only rank that is not in send, recv or a collective; "
        text += f"rank {others[0].rank} {others[0].doing}"
        return _about(others[0], "missing", text, fault=False)
    text = "all ranks wait in send, recv or a collective; it is unknown which rank waits for which other rank"
    return Explanation(cause="send_recv", sentence=text, fault=False)


def _about(view: RankView, cause: Cause, sentence: str, *, fault: bool = True) -> Explanation:
    return Explanation(cause=cause, sentence=sentence, fault=fault, rank=view.rank, node=view.node)


def _waiting(ranks: Sequence[RankView]) -> list[tuple[RankView, Collective, float]]:
    """Return the ranks that wait longer than usual, each with its collective and its waiting time in seconds.

    An ``all_`` collective is skipped if any rank has completed it, because then all ranks have entered it. Other ranks
    can still appear to wait in it, because the ranks are not sampled at the same time.
    """
    calls = ((key, call) for view in ranks for key, call in view.collectives.items())
    entered = {key for key, call in calls if call.done and call.op.startswith("all_")}
    waits = ((view, view.waits_in) for view in ranks)
    late = [
        (view, call, view.read_at - call.at) for view, call in waits if call and (call.group, call.seq) not in entered
    ]
    return [(view, call, for_s) for view, call, for_s in late if for_s > max(MIN_WAIT_S, PACES * view.pace_s)]


def _mismatch(ranks: Sequence[RankView], world_size: int) -> Explanation | None:  # noqa: ARG001
    """Find the first collective that the ranks call differently, in the groups in which a rank waits.

    The ranks may have left it since: gloo completes an all_reduce of different sizes, and the next collective hangs.
    """
    groups = {collective.group for _, collective, _ in _waiting(ranks)}
    keys = {key for view in ranks for key in view.collectives if key[0] in groups}
    for key in sorted(keys):
        entered = [(view, view.collectives[key]) for view in ranks if key in view.collectives]
        is_same_sized = all(collective.op.startswith(SAME_SIZES) for _, collective in entered)
        calls: dict[tuple[str, ...], list[tuple[RankView, Collective]]] = {}
        for view, collective in entered:
            call = (collective.op, collective.sizes, collective.dtypes) if is_same_sized else (collective.op,)
            calls.setdefault(call, []).append((view, collective))
        if len(calls) < 2:
            continue
        most, *_, fewest = sorted(calls.values(), key=len, reverse=True)
        (_, usual), (odd, its) = most[0], fewest[0]
        others = [view.rank for call in calls.values() if call is not fewest for view, _ in call]
        rule = "pass tensors of the same shape and type to a collective"
        if its.op != usual.op:
            rule = "call the same collectives in the same order"
        verbs = ("is", "are") if odd.waits_in == its else ("was", "were")
        text = (
            f"{odd.who} {verbs[0]} in {its.name} with {its.shape}, while {_ranks(others, *verbs)} in {usual.op} "
            f"#{usual.seq} with {usual.shape}: all ranks of a group must {rule}, and have the same number of batches; "
            f"rank {odd.rank} {odd.doing}"
        )
        return _about(odd, "mismatch", text)
    return None


def _ranks(numbers: Sequence[int], singular: str, plural: str) -> str:
    """Return the ranks and the verb of a sentence, such as ``ranks 1 and 3 are`` or ``6 ranks are``."""
    if len(numbers) == 1:
        return f"rank {numbers[0]} {singular}"
    return f"{f'ranks {numbers[0]} and {numbers[1]}' if len(numbers) == 2 else f'{len(numbers)} ranks'} {plural}"


def _missing(ranks: Sequence[RankView], world_size: int) -> Explanation | None:
    waiting = _waiting(ranks)
    blocked = {view.rank for view, *_ in waiting}
    members: dict[str, set[int]] = {DEFAULT_GROUP: set(range(world_size))}
    for view in ranks:
        for group, _ in view.collectives:
            members.setdefault(group, set()).add(view.rank)
    absent: dict[int, tuple[Collective, float]] = {}
    views = {view.rank: view for view in ranks}
    for _, collective, waited_s in sorted(waiting, key=lambda entry: entry[1].at):
        # A rank that holds the GIL does not answer. It counts as absent if all other ranks wait for it.
        all_others = sum(call.name == collective.name for _, call, _ in waiting) == len(members[collective.group]) - 1
        for rank in members[collective.group] & views.keys():
            is_silent = views[rank].unknown and not views[rank].share(COLLECTIVES)
            if views[rank].is_before(collective) or (is_silent and all_others):
                absent.setdefault(rank, (collective, waited_s))
    roots = [rank for rank in absent if rank not in blocked] or sorted(absent)
    if not roots:
        return None
    view, (collective, waited_s) = views[roots[0]], absent[roots[0]]
    waiters = [other.rank for other, call, _ in waiting if other is not view and call.name == collective.name]
    who, for_s = f"{_ranks(waiters, 'has', 'have')} been waiting", f"for {format_duration(waited_s)}"
    if view.rank in blocked:
        own = next(call for other, call, _ in waiting if other is view)
        text = f"{view.who} is in {own.name}, but {who} for rank {view.rank} in {collective.name} {for_s}"
        return _about(view, "order", f"the ranks call collectives in different orders: {text}")
    waited_for = f"{collective.name} ({collective.shape}), but {who} in it {for_s}"
    more = f"; {_ranks(roots[1:], 'has', 'have')} not entered it either" if len(roots) > 1 else ""
    text = f"{_absence(view, 'entered', 'entering')} {waited_for}{more}{_activity(view)}"
    fault = view.has_ended or (waited_s >= HANG_S and not view.runs)
    if not fault:
        text += f". Rank {view.rank} {NOT_BLOCKED}" if waited_s >= HANG_S else NOT_YET
    cause: Cause = "data_loader" if view.share(LOADER) > MOSTLY else "checkpoint" if view.saves else "missing"
    return _about(view, "ended_early" if view.has_ended else cause, text, fault=fault)


def _absence(view: RankView, done: str, doing: str) -> str:
    """Return how a sentence begins, such as ``rank 1 has not entered`` or ``rank 1 has ended without entering``."""
    return f"{view.who} has ended without {doing}" if view.has_ended else f"{view.who} has not {done}"


def _activity(view: RankView) -> str:
    """Return the end of the sentence that ``_absence`` begins: what the rank does, or nothing if it has ended."""
    return "" if view.has_ended else f"; rank {view.rank} {view.doing}"


def _no_group(ranks: Sequence[RankView], world_size: int) -> Explanation | None:
    without = [view for view in ranks if view.group_at is None]
    met = [view for view in ranks if not view.collectives and view.share(COLLECTIVES) == 1 and view.group_at]
    meeting = [view.read_at - (view.group_at or 0.0) for view in met]
    if not without or not meeting or len(without) == world_size or max(meeting) < MIN_WAIT_S:
        return None
    view = without[0]
    others, waiting = [other.rank for other in without[1:]], [other.rank for other in met]
    more = f"; {_ranks(others, 'has', 'have')} not called it either" if others else ""
    waits = f"{_ranks(waiting, 'has', 'have')} been waiting in it for {format_duration(max(meeting))}"
    text = f"{_absence(view, 'called', 'calling')} init_process_group, but {waits}{more}{_activity(view)}"
    fault = not view.state or max(meeting) >= HANG_S
    cause: Cause = "no_group" if view.state else "ended_early"
    return _about(view, cause, text if fault else text + NOT_YET, fault=fault)


def _arrivals(ranks: Sequence[RankView], world_size: int) -> list[list[tuple[float, int]]]:
    """Return a list for each collective of the default process group that all ranks have entered.

    The list has a pair (time, rank) for each rank, sorted by the time at which the rank entered the collective.
    """
    shared = sorted({key for view in ranks for key in view.collectives if key[0] == DEFAULT_GROUP})
    arrivals = [{view.rank: view.collectives[key].at for view in ranks if key in view.collectives} for key in shared]
    return [sorted((at, rank) for rank, at in times.items()) for times in arrivals if len(times) == world_size > 1]


def _straggler(ranks: Sequence[RankView], world_size: int) -> Explanation | None:
    """Find the rank or node that is last in most collectives, and late for much of the time."""
    arrivals = _arrivals(ranks, world_size)
    by_rank, by_node = {view.rank: view.rank for view in ranks}, {view.rank: view.node for view in ranks}
    for owners, whole in itertools.product((by_rank, by_node), (arrivals, arrivals[len(arrivals) // 2 :])):
        if len(whole) < MIN_COLLECTIVES:
            continue
        number, times, share, lag_s = _last(whole, owners)
        views = [view for view in ranks if owners[view.rank] == number]
        is_late = times >= STRAGGLER_LAST * len(whole) and share >= STRAGGLER_SHARE
        others = [state for view in ranks if view not in views for state in view.states]
        if sum("nanosleep" in str(state.get("wchan")) for state in others) > MOSTLY * len(others):
            continue  # the other ranks sleep, so they do not wait for this rank
        if is_late and sum(view.share(COLLECTIVES) for view in views) <= MOSTLY * len(views):
            break
    else:
        return None
    view, num_samples = views[0], sum(len(view.stacks) for view in views)
    places = Counter(place for view in views for stack in view.stacks if (place := place_of(stack)))
    where = ", ".join(f"{place} in {count} of {num_samples} samples" for place, count in places.most_common(2))
    cause: Cause = "data_loader" if view.share(LOADER) > MOSTLY else "straggler"
    who, they = (view.who, f"rank {number} was") if owners is by_rank else (f"node {number}", "its ranks were")
    loads = f"; {they} waiting for data" if cause == "data_loader" else ""
    text = (
        f"{who} is slow: it was last in {times} of {len(whole)} collectives, and entered them "
        f"{1000 * lag_s:.0f} ms after the others (median){loads}; {they} at {where or 'a place that is not known'}"
    )
    return replace(_about(view, cause, text), rank=view.rank if owners is by_rank else None)


def _last(whole: Sequence[Sequence[tuple[float, int]]], owners: Mapping[int, int]) -> tuple[int, int, float, float]:
    """Find the rank or node that is most often the last one to enter a collective.

    Return its number, how often it was the last one, the share of the time in which it was the only one that had not
    entered a collective, and the median of its lag behind the others in seconds. During the share, the others need not
    wait: DDP's collectives run beside the backward pass. To find a rank, ``owners`` maps each rank to itself. To find a
    node, it maps each rank to the number of its node.
    """
    number, times = Counter(owners[arrivals[-1][1]] for arrivals in whole).most_common(1)[0]
    alone_s, until, lags = 0.0, 0.0, []
    for arrivals in whole:
        others = [at for at, rank in arrivals if owners[rank] != number]
        if others and owners[arrivals[-1][1]] == number:
            lags.append(arrivals[-1][0] - others[-1])
            alone_s += max(0.0, arrivals[-1][0] - max(others[-1], until))
            until = max(until, arrivals[-1][0])
    return number, times, alone_s / ((whole[-1][-1][0] - whole[0][0][0]) or 1.0), median(lags or [0.0])


def _slow_data(ranks: Sequence[RankView], world_size: int) -> Explanation | None:  # noqa: ARG001
    """Find out whether the ranks mostly wait for their data loaders while they are not in a collective."""
    stacks = [stack for view in ranks for stack in view.stacks if stack]
    own = [stack for stack in stacks if not has_file(stack, COLLECTIVES)]
    num_waits = sum(has_file(stack, LOADER) for stack in own)
    if num_waits <= MOSTLY * len(own):
        return None
    view = max(ranks, key=lambda view: view.share(LOADER))
    text = f"the ranks wait for their data in {num_waits} of the {len(own)} samples outside collectives"
    return Explanation(cause="data_loader", sentence=f"{text}; {view.who} {view.doing}", fault=False)
