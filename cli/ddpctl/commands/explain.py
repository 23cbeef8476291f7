"""``ddpctl explain``: ask all ranks of a run what they are doing, and report why it hangs, is slow or has failed."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ddpctl.commands.arguments import Json, RunName, Task
from ddpctl.errors import DdpctlError, UnavailableError

if TYPE_CHECKING:
    from ddpctl.explain import Explanation, RankView
    from ddpctl.launcher import AppContext
    from ddpctl.node_probe import Probe, ProbeResult
    from ddpctl.run_status import RunStatus
    from ddpctl.run_store import Run

ANSWER_S = 20.0  # nodes usually answer in about 3 s
POLL_S = 0.5
MAX_BYTES, LOG_CHARS = 2_000_000, 8_000
CLOCK_OFFSET = re.compile(r"^ddp_clock_offset_seconds(?:{[^}]*})? (\S+)$", re.MULTILINE)


def explain(run: RunName = None, task: Task = None, as_json: Json = False) -> None:
    """Say why a run hangs, is slow or has failed.

    It asks all ranks of all nodes where they are. This takes a few seconds and does not interrupt the training. If a
    run was killed because it hung, the answers from before the kill are used.
    """
    from ddpctl import launcher

    context = launcher.open_context(os.environ)
    record = launcher.find(context, run, task=task)
    (state,) = launcher.status(context, (record,))
    found = explain_run(context, record, state)
    if as_json:
        print(json.dumps({"run": record.name, "state": state.state, **asdict(found)}, indent=1))
        return
    print(f"{record.name}  {state.state}: {found.sentence}")
    for line in (*found.evidence, *(f"not known: {line}" for line in found.unknown)):
        print(f"  {line}")


def explain_run(context: "AppContext", run: "Run", state: "RunStatus") -> "Explanation":
    """Explain a run from its nodes' answers, or from files they kept. Raises UnavailableError if no node answers."""
    from ddpctl import explain as explaining
    from ddpctl.node_probe import Probe
    from ddpwire.events import EVENTS, read_events
    from ddpwire.run_files import diagnosis_file, rank_log

    if outcome := state.outcome:
        name, log = diagnosis_file(outcome.attempt), "" if outcome.rank is None else rank_log(outcome.rank)
        files = (name, EVENTS, *([log] if log else []))
        seen = _probe(context, run, Probe(metrics=False, files=files, max_bytes=MAX_BYTES))
        kept = read_answers(seen, name) if outcome.cause == "hang" else {}
        words = next((one.files[log] for one in seen if log in one.files), "")[-LOG_CHARS:]
        events = read_events(*(one.files.get(EVENTS, "") for one in seen))
        found = explaining.explain_outcome(outcome, _views(kept), words, events, run.job.world_size)
        asked_for = state.state == "stopped"
        return replace(found, cause="none", fault=False, rank=None, node=None) if asked_for else found
    if state.state not in ("running", "training", "stopping"):
        return explaining.Explanation(cause="unknown", sentence=f"no rank runs: {state.message}", fault=False)
    return explaining.explain_ranks(_views(ask(context, run)), run.job.world_size)


def hang_lines(context: "AppContext", run: "Run", state: "RunStatus") -> list[str]:
    """Return why a run hung, for other verbs; nothing if it was not killed for that, or if the reason is unknown."""
    if state.outcome is None or state.outcome.cause != "hang":
        return []
    with suppress(DdpctlError):
        found = explain_run(context, run, state)
        return [f"  why          {found.sentence}"] if found.cause != "unknown" else []
    return []


def ask(context: "AppContext", run: "Run") -> "Mapping[int, tuple[RankView, ...]]":
    """Ask the ranks of all nodes, and return the answers, keyed by node. Raises UnavailableError if no node answers."""
    from ddpctl.node_probe import Probe
    from ddpwire.run_files import DIAGNOSIS

    request = os.urandom(8).hex()
    deadline = time.monotonic() + ANSWER_S
    seen = _probe(context, run, Probe(metrics=False, request=request))
    answers: Mapping[int, tuple[RankView, ...]] = {}
    while len(answers) < len(seen) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        seen = _probe(context, run, Probe(files=(DIAGNOSIS,)))
        answers = read_answers(seen, DIAGNOSIS, request)
    if not answers:
        why = next((one.failure for one in seen if one.failure), "")
        raise UnavailableError(
            f"{run.name}: no node has answered in {ANSWER_S:g} s{f': {why}' if why else ''}",
            hint=f"ddpctl status {run.name}; a ddprun of another version cannot be asked",
        )
    return answers


def read_answers(
    seen: "Sequence[ProbeResult]", name: str, request: str | None = None
) -> "Mapping[int, tuple[RankView, ...]]":
    """Return the ranks, keyed by node, for the nodes that have answered ``request`` (None: any request)."""
    from ddpctl import explain as explaining
    from ddpwire.run_files import parse_json

    found = {}
    for one in seen:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # no answer yet, or one from another version
            answer = parse_json(one.files[name])
            offset = CLOCK_OFFSET.search(one.metrics)
            if request in (None, answer["request"]):
                views = explaining.read_answer(answer, clock_offset_s=float(offset[1]) if offset else 0.0)
                found[one.node] = views
    return found


def _views(answers: "Mapping[int, tuple[RankView, ...]]") -> "list[RankView]":
    return sorted((view for views in answers.values() for view in views), key=lambda view: view.rank)


def _probe(context: "AppContext", run: "Run", probe: "Probe") -> "tuple[ProbeResult, ...]":
    from ddpctl import launcher

    return context.executor.perform(launcher.target_of(run).probe(run, probe))
