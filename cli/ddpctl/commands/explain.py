"""The subcommands ``explain`` and ``profile``. They ask all ranks of a run what they are doing."""

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.arguments import Json, RunName, Task, find_run, print_result, run_arguments
from ddpctl.commands.formatting import closing_lines
from ddpctl.errors import DdpctlError, UnavailableError, writing
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import RunStatus, places_taken
from ddpctl.runs.run_store import Run
from ddpctl.text import one_line
from ddpctl.watch.timeline import read_environments
from ddpwire.events import EVENTS, Event, read_events
from ddpwire.run_files import DIAGNOSIS, ENVIRONMENT, NODE_LOG, PROFILE, diagnosis_file, parse_json, rank_log

if TYPE_CHECKING:
    from ddpctl.diagnosis.explain import Explanation
    from ddpctl.diagnosis.profile import RankProfile
    from ddpctl.diagnosis.rank_view import RankView

WITH_RANKS = ("running", "training", "stopping")  # the states in which ranks can answer
ANSWER_S = 20.0  # nodes usually answer in about 3 s
PROFILE_ANSWER_S = 60.0  # in addition to the recorded seconds
# A rank's first recording begins some seconds late if its machine is busy, later ones begin at once.
PROFILE_TRIES = 3
POLL_S = 0.5
MAX_PROFILE_BYTES, END_BYTES = 1 << 30, 200
MAX_BYTES, LOG_CHARS = 2_000_000, 8_000
CLOCK_OFFSET = re.compile(r"^ddp_clock_offset_seconds(?:{[^}]*})? (\S+)$", re.MULTILINE)


def explain(run: RunName = None, task: Task = None, as_json: Json = False) -> None:
    """Explain why a run hangs, is slow or has failed.

    The command asks all ranks what they are doing. This takes a few seconds and does not interrupt the training. For
    a run that was killed because it hung, the command uses the answers that the ranks gave before the kill.
    """
    context, record = find_run(run, task)
    (state,) = launcher.status(context, (record,))
    explanation = explain_run(context, record, state)
    explanation = replace(explanation, evidence=(*explanation.evidence, *places_taken(state.nodes)))
    lines = [
        f"{record.name}  {state.state}: {explanation.sentence}",
        *(f"  {line}" for line in explanation.evidence),
        *(f"  it is not known {line}" for line in explanation.unknown),
        *(
            [f"  what to do: docs/explain.md, cause {explanation.cause}"]
            if explanation.fault and explanation.cause != "failed"
            else []
        ),
    ]
    print_result({"run": record.name, "state": state.state, **asdict(explanation)}, lines, as_json=as_json)


def explain_run(context: AppContext, run: Run, state: RunStatus) -> "Explanation":
    """Explain an active run from its ranks' answers, or an ended run from its files.

    Raises UnavailableError if no node answers.
    """
    from ddpctl.diagnosis import explain as explaining

    if outcome := state.outcome:
        is_lost = outcome.cause == "node_lost"  # then no rank is known to have failed
        name, logs = diagnosis_file(outcome.attempt), () if outcome.rank is None else (rank_log(outcome.rank),)
        logs = (NODE_LOG,) if is_lost else logs
        answers = launcher.probe(
            context, run, Probe(metrics=False, files=(name, EVENTS, ENVIRONMENT, *logs), max_bytes=MAX_BYTES)
        )
        views = read_answers(answers, name) if outcome.has_diagnosis else []
        failed = [node.files for node in answers if node.node == outcome.node or not is_lost]
        text = next((files[log][-LOG_CHARS:] for files in failed for log in logs if log in files), None)
        explanation = explaining.explain_outcome(outcome, views, text, last_events(answers), run.job.world_size)
        if outcome.cause == "config":
            versions = explaining.explain_software(read_environments(answers))
            return replace(explanation, evidence=(*versions, *explanation.evidence))
        lost = {
            node.node: node.outcome.node for node in state.nodes if node.outcome and node.outcome.cause == "node_lost"
        }
        if outcome.node in lost and lost[outcome.node] != outcome.node:
            disagreement = (
                f", but node {outcome.node} reports that node {lost[outcome.node]} was lost: the network between them "
                "failed, or a machine was suspended or overloaded"
            )
            return replace(explanation, cause="network", sentence=explanation.sentence + disagreement, unknown=())
        if state.state == "stopped":
            return replace(explanation, cause="none", sentence=state.message, fault=False, rank=None, node=None)
        return explanation
    if state.state not in WITH_RANKS:
        return explaining.Explanation(cause="unknown", sentence=_without_ranks(state), fault=False)
    answers = ask(context, run, os.urandom(8).hex(), DIAGNOSIS, timeout_s=ANSWER_S, max_bytes=MAX_BYTES)
    explanation = explaining.explain_ranks(read_answers(answers, DIAGNOSIS), run.job.world_size)
    answers = launcher.probe(context, run, Probe(metrics=False, files=(EVENTS,)))
    reported = explaining.explain_events(last_events(answers))
    if reported and explanation.cause in ("none", "unknown"):
        return replace(reported[0], evidence=explanation.evidence, unknown=explanation.unknown)
    return explanation


def last_events(answers: Sequence[ProbeResult]) -> list[Event]:
    """Return the events of the last start of each node: earlier starts do not explain it."""
    started: dict[int, float] = {}
    events = read_events(*(node.files.get(EVENTS, "") for node in answers))
    for event in events:
        if event.event == "node_started":
            started[event.node] = max(event.time, started.get(event.node, event.time))
    return [event for event in events if event.time >= started.get(event.node, event.time)]


def _without_ranks(state: RunStatus) -> str:
    reason = "it is unknown whether its ranks run" if state.state == "unknown" else "no rank runs"
    return f"{reason}: {state.message}"


def why(context: AppContext, run: Run, state: RunStatus) -> str:
    """Return why a run hangs, hung or failed. Return "" if the cause is unknown or already in the run's message."""
    with suppress(DdpctlError):
        known = None if state.outcome and not state.outcome.code else explain_run(context, run, state)
        if known and known.fault and known.cause != "unknown" and known.sentence not in one_line(state.message):
            return known.sentence
    return ""


def hang_lines(context: AppContext, run: Run, state: RunStatus) -> list[str]:
    """Return one line about why ranks waited in vain. The list is empty if they did not, or the cause is unknown."""
    sentence = why(context, run, state) if state.outcome and state.outcome.has_diagnosis else ""
    return [f"  why          {sentence}"] if sentence else []


def emit_end(context: AppContext, run: Run, state: RunStatus, code: int) -> None:
    """Print the result of a run after its end. ``code`` is ddpctl's exit code."""
    for line in (*closing_lines(run, state, code=code), *hang_lines(context, run, state)):
        context.emit(line)
    with suppress(DdpctlError):
        for text in context.executor.perform(launcher.target_of(run).made(run)) if state.ended else ():
            context.emit(f"  made         {text} (ddpctl pull {run.name} fetches them)")


def ask(
    context: AppContext, run: Run, request: str, file: str, *, timeout_s: float, max_bytes: int
) -> tuple[ProbeResult, ...]:
    """Send ``request`` to each node, and wait at most ``timeout_s`` seconds for the answers.

    The nodes write their answers to ``file``. Returns the last ``max_bytes`` bytes of each answer. Raises
    UnavailableError if no node answers.
    """
    deadline = time.monotonic() + timeout_s
    nodes = launcher.probe(context, run, Probe(metrics=False, request=request))
    answers: tuple[ProbeResult, ...] = ()
    while len(answers) < min(len(nodes), run.job.max_nodes) and time.monotonic() < deadline:  # spares do not answer
        time.sleep(POLL_S)
        nodes = launcher.probe(context, run, Probe(files=(file,), max_bytes=max_bytes))
        answers = tuple(node for node in nodes if request in node.files.get(file, ""))
    if answers:
        return answers
    hint = f"ddpctl status {run_arguments(run)}"
    if launcher.status(context, (run,))[0].ended:
        raise UnavailableError(f"run '{run.name}' ended before a node answered", hint=hint)
    cause = "".join([f": {node.failure}" for node in nodes if node.failure][:1])
    raise UnavailableError(
        f"{run.name}: no node has answered in {timeout_s:g} s{cause}",
        hint=f"{hint}; a ddprun of another version cannot be asked",
    )


def read_answers(answers: Sequence[ProbeResult], name: str) -> "list[RankView]":
    """Parse the file ``name`` of each node. Return the ranks that these files describe, sorted by rank."""
    from ddpctl.diagnosis.rank_view import read_answer

    views: list[RankView] = []
    for node in answers:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # no answer, or another version's
            offset_s = clock_offset(node) if node.node else 0.0
            views += read_answer(parse_json(node.files[name]), clock_offset_s=offset_s)
    return sorted(views, key=lambda view: view.rank)


def clock_offset(answer: ProbeResult) -> float | None:
    """Return how many seconds a node's clock is ahead of node 0's, or None if ``answer`` has no metrics."""
    match = CLOCK_OFFSET.search(answer.metrics)
    return float(match[1]) if match else None


def profile(
    run: RunName = None,
    task: Task = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=30, metavar="S", help="How many seconds to record.")
    ] = 2.0,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "trace.json.gz"
    ),
    as_json: Json = False,
) -> None:
    """Record a trace of what all ranks of a run do.

    The run continues. You can open the trace in https://ui.perfetto.dev. For each rank, the command also prints the
    shares of the time that the rank spends on computing, communicating and waiting for data. It names the slowest rank.
    """
    from ddpctl.diagnosis import profile as profiling

    context, record = find_run(run, task)
    (state,) = launcher.status(context, (record,))
    if state.state not in WITH_RANKS:
        raise UnavailableError(f"{record.name}: {_without_ranks(state)}")
    for _ in range(PROFILE_TRIES):
        request = f"profile {seconds:.3f} {os.urandom(8).hex()}"
        ask(context, record, request, PROFILE, timeout_s=seconds + PROFILE_ANSWER_S, max_bytes=END_BYTES)
        answers = launcher.probe(context, record, Probe(files=(PROFILE, EVENTS), max_bytes=MAX_PROFILE_BYTES))
        profiles, events, unknown = read_profiles(answers, request)
        if all(profile.unknown for profile in profiles):
            message = f"{record.name}: " + "; ".join(f"it is not known {line}" for line in unknown)
            hint = f"ddpctl explain {run_arguments(record)} shows what is known from outside the ranks"
            raise UnavailableError(message, hint=hint)
        summary = profiling.summarise(profiles)
        if summary["shares"]:
            break
        unknown.append("how the ranks compare: record for longer, with --seconds")
    with writing(output):
        output.write_bytes(profiling.chrome_trace(profiles, events))
    lines = [
        f"{record.name}  {summary['sentence']}",
        *(f"  {line}" for line in profiling.summary_table(profiles, summary["shares"])),
        *(f"  it is not known {line}" for line in unknown),
        f"{summary['seconds']:.1f} s of all ranks are in {output}: open the file in https://ui.perfetto.dev",
    ]
    document = {"run": record.name, "trace": str(output), **summary, "unknown": unknown}
    print_result(document, lines, as_json=as_json)


def read_profiles(answers: Sequence[ProbeResult], request: str) -> "tuple[list[RankProfile], list[Event], list[str]]":
    """Return the ranks' profiles, the events, and a list of what is not known. Times are on the clock of node 0."""
    from ddpctl.diagnosis.profile import read_profile

    profiles, events, unknown = [], [], []
    for node in answers:
        offset_s, text = clock_offset(node) or 0.0, node.files.get(PROFILE, "")
        try:
            profiles += read_profile(text if request in text else "", clock_offset_s=offset_s)
        except ValueError:
            unknown.append(f"what node {node.node} did: {node.failure or 'no answer, or a damaged answer'}")
        if node.node and clock_offset(node) is None:
            unknown.append(f"how far the clock of node {node.node} is ahead of node 0's")
        events += [replace(event, time=event.time - offset_s) for event in read_events(node.files.get(EVENTS, ""))]
    unknown += [f"what {profile.who} did: {profile.unknown}" for profile in profiles if profile.unknown]
    return sorted(profiles, key=lambda profile: profile.rank), events, unknown
