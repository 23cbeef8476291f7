"""What the login node's answers say of a run: Slurm knows whether it runs, the nodes' files how. Pure."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ddpctl.run import NodeReport, Run, RunStatus, State, fold
from ddpctl.targets.slurm.states import HOPELESS, state_of
from ddpwire import folder
from ddpwire.exits import Exit
from ddpwire.node import NodeState, read_node
from ddpwire.outcome import Outcome, read_outcome

HEADER = re.compile(r"^==> (.*) <==$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm says of a job, or of one of an array."""

    id: str
    task: str | None  # its index in the array
    word: str  # Slurm's state
    reason: str = ""
    start: str = ""

    @property
    def state(self) -> State:
        """In our words."""
        return state_of(self.word)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """All that was found out."""

    jobs: tuple[Job, ...]
    files: Mapping[str, str]
    error: str = ""  # Slurm's, when it did not answer


def read_answers(text: str) -> Answers:
    """What ``ASK`` wrote."""
    _, *parts = HEADER.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    jobs, error = [], ""
    for line in sections.pop("squeue", "").strip().splitlines():
        if line.startswith("error: "):
            error = line.removeprefix("error: ")
            continue
        words = line.split("|")
        if len(words) >= 5:
            task = words[1] if words[1].isdecimal() else None
            jobs.append(Job(id=words[0], task=task, word=words[2], reason=words[3], start=words[4]))
    return Answers(jobs=tuple(jobs), files=sections, error=error)


def node_files(run_dir: str, nodes: int) -> tuple[str, ...]:
    """The files that say how the nodes of a job fare."""
    dirs = [PurePath(run_dir) / folder.node_name(node) for node in range(nodes)]
    return tuple(str(path / name) for path in dirs for name in (folder.NODE, folder.OUTCOME))


def status_of(run: Run, run_dir: str, job: Job | None, answers: Answers, *, young: bool) -> RunStatus:
    """How one job of a run fares: Slurm knows whether it runs, the nodes' files how, and how it ended."""
    reports = tuple(_report(node, run_dir, job, answers) for node in range(run.job.max_nodes))
    if answers.error and job is None:
        return RunStatus(run=run.name, state="unknown", message=f"Slurm does not answer: {answers.error}")
    if job is not None and job.state == "pending":
        return RunStatus(run=run.name, state="pending", message=waits(job), nodes=())
    found = fold(run.name, reports, young=young and job is None)
    if job is None:
        return _lost(found) if found.state == "lost" else found
    if job.state in ("starting", "training", "stopping"):
        if found.alive:
            return found
        state: State = "stopping" if found.outcome else "starting"
        return RunStatus(run=run.name, state=state, message=f"Slurm: job {job.id} is {job.word}", nodes=reports)
    if job.state == "unknown":
        return RunStatus(run=run.name, state="unknown", message=f"Slurm: job {job.id} is {job.word}", nodes=reports)
    return _ended(found, job)


def _ended(found: RunStatus, job: Job) -> RunStatus:
    """It has ended: what its nodes agreed on says more than Slurm does, unless they had no word left."""
    if found.outcome:
        return found
    code = {"succeeded": Exit.OK, "stopped": Exit.SAVED_TERM}.get(job.state, Exit.KILLED)
    if job.state == "succeeded":
        return RunStatus(run=found.run, state="succeeded", message="Slurm: COMPLETED", code=0, nodes=found.nodes)
    began = any(report.state for report in found.nodes)
    return RunStatus(
        run=found.run,
        state=job.state,
        message=f"Slurm: job {job.id} is {job.word}{'; its nodes left no word (see job.log)' if began else ''}",
        code=Exit.KILLED if began else int(code),
        nodes=found.nodes,
    )


def _lost(found: RunStatus) -> RunStatus:
    message = "Slurm has forgotten the job, and its nodes left no word: see job.log"
    return RunStatus(run=found.run, state="lost", message=message, code=Exit.KILLED, nodes=found.nodes)


def waits(job: Job) -> str:
    """Why a job waits, and until when."""
    why = HOPELESS.get(job.reason)
    if why:
        return f"job {job.id} waits ({job.reason}): {why}"
    start = f", to start about {job.start}" if job.start not in ("", "N/A") else ""
    return f"job {job.id} waits{f' ({job.reason})' if job.reason not in ('', 'None') else ''}{start}"


def _report(node: int, run_dir: str, job: Job | None, answers: Answers) -> NodeReport:
    def read(name: str, reader: Any) -> Any:
        text = answers.files.get(str(PurePath(run_dir) / folder.node_name(node) / name))
        with suppress(ValueError):
            return reader(text) if text else None
        return None

    state: NodeState | None = read(folder.NODE, read_node)
    outcome: Outcome | None = read(folder.OUTCOME, read_outcome)
    alive = job is not None and job.state in ("training", "stopping") and outcome is None
    return NodeReport(node=node, alive=alive, state=state, outcome=outcome)


def together(run: Run, states: tuple[RunStatus, ...], tasks: tuple[str, ...]) -> RunStatus:
    """An array as one run: it goes on while one of them does, and has ended as the worst of them."""
    words = [state.state for state in states]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    going = next((state for state in states if not state.ended and state.state != "pending"), None)
    waiting = next((state for state in states if state.state == "pending"), None)
    nodes = tuple(report for state in states for report in state.nodes)
    if going or waiting:
        state = (going or waiting).state  # type: ignore[union-attr]
        return RunStatus(run=run.name, state=state, message=f"array of {len(tasks)}: {counts}", nodes=nodes)
    number, worst = max(enumerate(states), key=lambda pair: pair[1].code or 0)
    message = f"array of {len(tasks)}: {counts}"
    if worst.code:
        message += f"; task {tasks[number]}: {worst.message}"
    return RunStatus(
        run=run.name, state=worst.state, message=message, code=worst.code, outcome=worst.outcome, nodes=nodes
    )
