"""Judges the facts of a rehearsal (``python -m ddprun.rehearsal``): one row for each question. Pure.

A run is a dict: its scenario, the scenario that it follows ("after"), the exit codes of its nodes, and for each process
of a rank the facts that its observer recorded, by their kind. A process that resumes begins with the weights that a
process before it had after some step, so the step is known whatever the script counts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from ddpctl.text import counted

Verdict = Literal["ok", "fault", "unknown"]
Judgement = tuple[Verdict, str]
Facts = Mapping[str, Any]
SCENARIOS = ("term", "usr1", "int", "kill-rank", "kill-node", "slow", "disk", "raise")
PLAIN = ("plain",)
STARTS = ("term", "kill-rank", "kill-node", "disk")  # after which the ranks start again
DIGITS, ROUNDING = 16, 5  # of a double; that a float has at least after a sum in another order
UNSEEN = "no step of a torch.optim.Optimizer was seen"
OTHER_WEIGHTS = "it begins with weights that no step before had, or several"
LONGER = "use a larger --steps"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The answer to one question."""

    id: str
    question: str
    verdict: Verdict
    evidence: str
    mend: tuple[str, ...]  # lines of code, only for a fault


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A start of the ranks after another one."""

    title: str
    before: Mapping[int, Facts]  # the processes that took steps, by rank
    after: Mapping[int, Facts]
    run: Facts
    steps: Mapping[int, int | None]  # after which each rank continues; 0: from the beginning; None: unknown
    step: int | None  # after which rank 0 continues
    alike: Sequence[int]  # the ranks that continue after the same step as rank 0
    reached: int  # the last step before


class Rehearsal:
    """The facts of all runs."""

    def __init__(self, runs: Sequence[Facts]) -> None:
        self._runs = {(run["scenario"], run["after"]): run for run in runs}
        plain, again = (_ranks(self.run(name)) for name in ("plain", "again"))
        self.plain, self.again = ({rank: own for rank, own in ranks.items() if own["step"]} for ranks in (plain, again))
        self.ended = not any(process["cut"] for process in self.plain.values())
        self.steps = min((len(process["step"]) for process in self.plain.values()), default=0)
        # The second run begins in new folders, so only what the first one wrote elsewhere can change its length.
        self.is_repeated = not self.run("again") or self.steps == min(
            (len(process["step"]) for process in self.again.values()), default=0
        )
        self.failed = bool(self.plain) and self.ended and _failed(self.run("plain"))
        self.saves = sorted({save["step"] for save in _all(self.plain, "save") if not save["error"]})
        self.is_sharded = any(process["begin"][0]["sharded"] for process in self.plain.values())
        pairs = [(self.plain[rank]["step"], self.again[rank]["step"]) for rank in self.plain if rank in self.again]
        steps = chain.from_iterable(zip(*both, strict=False) for both in pairs)
        self.digits = min((_alike(*both) for both in steps), default=0)  # to which two undisturbed runs are equal
        starts = (self._resume(title) for title in STARTS)
        self.resumes = {resume.title: resume for resume in starts if resume}  # with the same number of ranks
        self.good = [resume for resume in self.resumes.values() if resume.step]

    def run(self, scenario: str, after: str = "") -> Facts:
        """Return a run, or an empty mapping."""
        return self._runs.get((scenario, after), {})

    def _resume(self, title: str) -> Resume | None:
        first, second = self.run(title), self.run("resume", title)
        return _resume(title, _ranks(first), _ranks(second) or _ranks(first, 2), second or first)


def _resume(title: str, before: Mapping[int, Facts], after: Mapping[int, Facts], run: Facts) -> Resume | None:
    if not after:
        return None
    steps = {rank: _place(before.get(rank), process) for rank, process in after.items()}
    step, reached = steps.get(0), _reached(before)
    alike = [rank for rank in steps if steps[rank] == step]
    return Resume(
        title=title, before=before, after=after, run=run, steps=steps, step=step, alike=alike, reached=reached
    )


def _ranks(run: Facts, number: int = 1) -> dict[int, Facts]:
    """Return the processes of the first start (or a later one, by ``number``) in which ranks took steps, by rank.

    The number of the attempt would not tell the starts apart: a single node that was killed begins again with 1.
    """
    starts = defaultdict[int, list[Facts]](list)
    for process in sorted(run.get("processes", ()), key=lambda process: process["start"][0]["time"]):
        if process["begin"]:
            starts[process["rank"]].append({**process, "step": _without_evaluations(process)})
    return {rank: processes[number - 1] for rank, processes in starts.items() if len(processes) >= number}


def _without_evaluations(process: Facts) -> list[Facts]:
    """Return the steps without the batches of iterations over a DataLoader that lie between two steps."""
    ends = {end["epoch"]: end["time"] for end in process["epoch"]}
    uses = Counter(epoch for step in process["step"] for epoch in {epoch for epoch, _ in step["batches"]})

    def is_trained(epoch: int, step: Facts) -> bool:
        return uses[epoch] > 1 or ends.get(epoch, math.inf) >= step["time"]

    steps = process["step"]
    return [{**step, "batches": [own for own in step["batches"] if is_trained(own[0], step)]} for step in steps]


def _all(ranks: Mapping[int, Facts], kind: str) -> list[Facts]:
    return [fact for process in ranks.values() for fact in process[kind]]


def _reached(ranks: Mapping[int, Facts]) -> int:
    return max((len(process["step"]) for process in ranks.values()), default=0)


def _place(before: Facts | None, after: Facts) -> int | None:
    begin, steps = after["begin"][0], [{**before["begin"][0], "step": 0}, *before["step"]] if before else ()
    equal = [step for step in steps if step["weights"] == begin["weights"]]
    if len(equal) > 1:  # a step has not changed the weights, such as the first one of a warm-up
        equal = [step for step in equal if step["state"] == begin["state"]]
    return int(equal[0]["step"]) if len(equal) == 1 else None


def _digits(first: Sequence[float | None], second: Sequence[float | None]) -> int:
    """Return the number of equal digits, and DIGITS if the numbers are equal."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None and a != b]
    largest = max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if not math.isnan(a - b)), default=0.0)
    return DIGITS if not largest else max(0, min(DIGITS - 1, int(-math.log10(largest))))


def _alike(first: Facts, second: Facts) -> int:
    """Return the number of equal digits of the losses and weights of two steps."""
    return _digits([first["loss"], *first["probe"]], [second["loss"], *second["probe"]])


def _to(digits: int) -> str:
    return "bit for bit" if digits == DIGITS else f"to {digits} digits" if digits else "in no digit"


def _batch(step: Facts) -> tuple[int, Sequence[int]]:
    """Return the last batch before a step: the number of the iteration over the DataLoader, and the samples."""
    return tuple(step["batches"][-1]) if step["batches"] else (-1, ())


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"


def _failed(run: Facts) -> bool:
    return run["hung"] or any(run["codes"])


def _end(run: Facts) -> str:
    code = next((code for code in run["codes"] if code), 0)
    message = run["outcome"] if code else ""
    return (
        "it hung, and was killed (see --hang-timeout)"
        if run["hung"]
        else f"it ended with exit code {code}{message and f' ({message})'}"
    )


def _elsewhere(facts: Rehearsal) -> str:
    if _failed(facts.run("again")):
        return f"the second undisturbed run did not do as the first one: {_end(facts.run('again'))}"
    written = {save["save"] for save in _all(facts.plain, "save")}
    read = (load["load"] for process in facts.run("again")["processes"] for load in process["load"])
    if path := next((path for path in read if path in written and "/ddpctl-rehearse-" not in path), ""):
        return f"it wrote to {path}, outside the project, and the next run read it"
    return "two undisturbed runs have different numbers of steps"


def _group(facts: Rehearsal) -> Judgement:
    run, plain = facts.run("plain"), facts.plain
    if not plain:
        ends = [_end(run) for run in (facts.run("gpus"), run) if run]
        return "unknown", f"{UNSEEN}: {', and with CPUs in place of GPUs '.join(ends)}"
    if facts.failed:
        return "fault", f"the undisturbed run failed after step {facts.steps}: {_end(run)}"
    sizes = {process["group"][0]["world"] if process["group"] else 1 for process in plain.values()}
    if sizes != {len(plain)}:
        alone = [rank for rank, process in plain.items() if not process["group"]]
        return "fault", f"{len(plain)} ranks train, and {_named(alone)} did not call init_process_group"
    if len({process["step"][facts.steps - 1]["weights"] for process in plain.values()}) > 1 and not facts.is_sharded:
        if len({process["begin"][0]["weights"] for process in plain.values()}) > 1:
            return "unknown", "the ranks begin with different weights, as the stages of a pipeline do"
        return "fault", f"after step {facts.steps} the ranks have different weights, and no shards of them"
    return (
        "ok",
        f"{counted(len(plain), 'rank')} in one group, with {'shards of the' if facts.is_sharded else 'equal'} weights",
    )


def _reports(facts: Rehearsal) -> Judgement:
    if not facts.plain:
        return "unknown", UNSEEN
    if errors := _all(facts.plain, "error"):
        return "unknown", f"some steps or samples could not be recorded: {errors[0]['error']}"
    devices = ", with CPUs in place of GPUs" * bool(facts.run("gpus"))
    seen = f"{counted(facts.steps, 'step')}{devices}{'' if facts.ended else f', then the run was cut ({LONGER})'}"
    reported = any(step["reported"] for step in _all(facts.plain, "step"))
    return "ok", f"{seen}{', reported by ddp.progress' if reported else ', not reported: seen in Optimizer.step'}"


def _repeatable(facts: Rehearsal) -> Judgement:
    if nan := [step["step"] for step in _all(facts.plain, "step") if math.isnan(step["loss"] or 0.0)]:
        return "unknown", f"the loss is NaN in step {min(nan)}"
    if not facts.digits:
        return "unknown", "two undisturbed runs differ in every digit: the script takes other random numbers in each"
    return "ok", f"losses and weights of two undisturbed runs are equal {_to(facts.digits)} (with equal seeds)"


def _epochs(facts: Rehearsal) -> list[dict[int, list[Sequence[int]]]]:
    """Return the batches of each rank in each whole epoch in which all ranks took steps."""
    epochs: dict[int, dict[int, list[Sequence[int]]]] = {}
    for rank, process in facts.plain.items():
        trained = {_batch(step)[0] for step in process["step"]}  # not those of an evaluation
        batches = [batch for fact in (*process["step"], *process["epoch"]) for batch in fact["batches"]]
        ends = [end["epoch"] for end in process["epoch"] if end["epoch"] in trained]
        for number, end in enumerate(ends):
            epochs.setdefault(number, {})[rank] = [indices for epoch, indices in batches if epoch == end]
    return [ranks for ranks in epochs.values() if len(ranks) == len(facts.plain)]


def _blind(facts: Rehearsal) -> str:
    if not _all(facts.plain, "loader"):
        return "no DataLoader was used"
    seen = any(_batch(step)[1] for step in _all(facts.plain, "step"))
    return "" if seen else "the DataLoader has no sampler, so its samples have no numbers"


def _samples(facts: Rehearsal) -> Judgement:
    epochs = _epochs(facts)
    if reason := _blind(facts) or (not epochs and f"no epoch ended within {facts.steps} steps: {LONGER}"):
        return "unknown", reason
    if facts.is_sharded and all(batches == ranks[min(ranks)] for ranks in epochs for batches in ranks.values()):
        return "unknown", "all ranks read the same batches, as tensor parallelism does"
    if len({len(process["step"]) for process in facts.plain.values()}) > 1:
        return "unknown", "the ranks took different numbers of steps, so their epochs cannot be compared"
    for number, ranks in enumerate(epochs, 1):
        own = [Counter(index for batch in batches for index in batch) for batches in ranks.values()]
        batch, counts = max(len(batch) for batches in ranks.values() for batch in batches), sum(own, Counter())
        unused = max(counts) + 1 - len(counts)
        if any(counter.total() - len(counter) > batch for counter in own):
            return "unknown", f"epoch {number}: a rank itself repeats samples, as a sampler with replacement does"
        if counts.total() - len(counts) > batch * len(ranks):
            sample, times = counts.most_common(1)[0]
            return "fault", f"epoch {number}: {times} ranks use sample {sample}, and {len(counts)} samples are used"
        if unused > batch * len(ranks):
            return "unknown", f"epoch {number}: {unused} of {max(counts) + 1} samples are not used: a part, or left out"
    return "ok", f"none twice or left out in {counted(len(epochs), 'epoch')}, except to fill or drop the last batch"


def _order(facts: Rehearsal) -> Judgement:
    orders = [[index for batch in ranks[min(ranks)] for index in batch] for ranks in _epochs(facts)[:2]]
    if reason := _blind(facts) or (len(orders) < 2 and f"no second epoch ended within {facts.steps} steps: {LONGER}"):
        return "unknown", reason
    if orders[0] != orders[1]:
        return "ok", "each epoch has another order"
    if min(orders[0], default=0) < 0:
        return "unknown", "the sampler's indices are no integers, so they have no order"
    is_shuffled = orders[0] != sorted(orders[0])
    return ("fault" if is_shuffled else "ok"), f"epochs 1 and 2 both begin with samples {orders[0][:4]} on rank 0"


def _asked(scenario: str, facts: Rehearsal) -> Judgement | None:
    if not (run := facts.run(scenario)):
        return None
    ranks, step, since = _ranks(run), run["act"]["step"], run["signalled"]
    if not since:
        return "unknown", f"the script ended before step {step}: {_end(run)}"
    times = [save["time"] - since for save in _all(ranks, "save") if save["time"] > since and not save["error"]]
    files = [file["file"] for file in _all(ranks, "file") if file["time"] > since]
    files = [file for file in files if "/tmp/" not in file.partition("/node-")[2]]  # noqa: S108 (a node's TMPDIR)
    wrote = times or [file for file in files if "/checkpoints/" in file]
    reached, resume = _reached(ranks), facts.resumes.get(scenario)
    if (resume.step or 0) >= step if resume and resume.step is not None else wrote:
        return "ok", f"asked at step {step}, saved step {reached} after {max(times, default=0.0):.1f} s; {_end(run)}"
    if files and not (resume and resume.step is not None):
        return "unknown", f"asked at step {step}, a file was written: {files[0]}; {_end(run)}"
    at = resume.step if resume and resume.step else max([save for save in facts.saves if save <= step], default=0)
    lost = f"asked at step {step}, not saved: steps {at + 1} to {reached} are lost; {_end(run)}"
    if scenario == "usr1" and (_asked("term", facts) or ("",))[0] == "ok":
        return "ok", f"{lost}. But ddpctl sends SIGUSR1 only with stop_signal: USR1, and SIGTERM saves"
    return "fault", lost


def _resumes(facts: Rehearsal) -> Judgement | None:
    starts, second = facts.resumes.values(), facts.run("resume", "term")
    if second and _failed(second) and "term" not in facts.resumes:
        return "fault", f"term: the second launch took no step; {_end(second)}"
    if facts.good:
        return "ok", ", ".join(f"{resume.title}: after step {resume.step} of {resume.reached}" for resume in facts.good)
    if any(resume.step is None for resume in starts):
        return "unknown", OTHER_WEIGHTS
    if not facts.saves and not facts.ended:
        return "unknown", f"nothing was saved within {facts.steps} steps: {LONGER}"
    saved = f"saved at steps {facts.saves[:4]}" if facts.saves else "nothing was saved"
    return ("fault", f"each start begins at step 1; {saved}") if starts else None


def _of_good(judge: Callable[[Rehearsal, Resume], Judgement | None], facts: Rehearsal) -> Judgement | None:
    """Return the worst judgement about the starts that resume, or None if there was no second start."""
    judgements = [(*judgement, resume.title) for resume in facts.good if (judgement := judge(facts, resume))]
    if not judgements:
        return ("unknown", "it does not resume, or after the last step") if facts.resumes else None
    order = ("fault", "unknown", "ok")
    verdict, evidence, title = min(judgements, key=lambda triple: order.index(triple[0]))
    return verdict, evidence if verdict == "ok" else f"{title}: {evidence}"


def _pairs(facts: Rehearsal, resume: Resume, rank: int) -> Iterator[tuple[int, Facts, Facts]]:
    """Yield the steps after a resume: the number, the step of the undisturbed run, and that of the resumed run."""
    start = resume.step or 0
    reference = facts.plain[rank]["step"][start:] if rank in facts.plain else ()
    for number, (plain, step) in enumerate(zip(reference, resume.after[rank]["step"], strict=False), start + 1):
        yield number, plain, step


def _data(facts: Rehearsal, resume: Resume) -> Judgement | None:
    if reason := _blind(facts):
        return _inputs(facts, resume, reason)
    start = resume.step or 0
    for rank in resume.alike:
        before, reference = resume.before[rank]["step"], facts.plain[rank]["step"]
        if start >= len(reference) or _batch(reference[start])[0] != _batch(reference[start - 1])[0]:
            continue  # it resumes at the beginning of an epoch
        for was, plain in zip(before, reference, strict=False):
            if _batch(was)[1] != _batch(plain)[1]:
                orders = f"step {was['step']} has samples {[*_batch(was)[1]][:3]} in a start, {[*_batch(plain)[1]][:3]}"
                return "fault", f"{orders} in another, so the rest of an epoch repeats some and skips others"
        for number, plain, step in _pairs(facts, resume, rank):
            if _batch(step)[1] != _batch(plain)[1]:
                other = next((old["step"] for old in reference if _batch(old)[1] == _batch(step)[1]), None)
                samples = f"the samples of step {other}" if other else f"other samples ({[*_batch(step)[1]][:3]})"
                return "fault", f"after step {start}, step {number} of rank {rank} uses {samples}"
    return _length(facts, resume) or ("ok", "the samples are those of the undisturbed run")


def _length(facts: Rehearsal, resume: Resume) -> Judgement | None:
    """Return a fault if a start takes more or fewer steps than were left, such as a whole epoch again."""
    if not facts.ended or _failed(resume.run) or any(process["cut"] for process in resume.after.values()):
        return None
    start, steps = resume.step or 0, min(len(process["step"]) for process in resume.after.values())
    text = f"after step {start}, it takes {steps} steps in place of {facts.steps - start}"
    return ("fault", text) if steps != facts.steps - start else None


def _inputs(facts: Rehearsal, resume: Resume, reason: str) -> Judgement | None:
    """Compare the first input of the model in each step, where the samples have no numbers."""
    pairs = [(rank, *pair) for rank in resume.alike for pair in _pairs(facts, resume, rank)]
    for rank, number, plain, step in pairs:
        if step["input"] != plain["input"]:
            text = f"after step {resume.step}, step {number} of rank {rank} has the input of "
            other = next((old["step"] for old in facts.plain[rank]["step"] if old["input"] == step["input"]), None)
            return ("fault", f"{text}step {other}") if other else ("unknown", f"{reason}; {text}no undisturbed step")
    if not all(step["input"] for *_, step in pairs):
        return "unknown", f"{reason}, and no module got a tensor"
    if not pairs:
        return None
    return _length(facts, resume) or ("ok", f"{reason}; the inputs of the model are those of the undisturbed run")


def _optimizer(facts: Rehearsal, resume: Resume) -> Judgement:
    start = resume.step or 0
    for rank in resume.alike:
        state, was = resume.after[rank]["begin"][0]["state"], resume.before[rank]["step"][start - 1]["state"]
        if state != was:
            return "fault", f"after step {start}, the state of rank {rank} is {'another' if state else 'empty'}"
        for number, plain, step in _pairs(facts, resume, rank):
            if _digits(step["lr"], plain["lr"]) < ROUNDING:
                return "fault", f"step {number} has learning rate {step['lr'][0]:g} in place of {plain['lr'][0]:g}"
    return "ok", "its state and learning rates are those of the step before"


def _weights(facts: Rehearsal) -> Judgement | None:
    starts = [_pairs(facts, resume, rank) for resume in facts.good for rank in resume.alike]
    equal = [pairs for start in starts if (pairs := [(_alike(a, b), number) for number, a, b in start])]
    if not equal or not facts.digits:
        return ("unknown", "there is no undisturbed step to compare with") if facts.resumes else None
    pairs = min(equal, key=min)
    worst, _ = min(pairs)
    text = f"losses and weights after a resume are equal {_to(worst)}"
    if worst >= facts.digits:
        return "ok", text
    begins, first = next(pair for pair in pairs if pair[0] < DIGITS)
    cause = "sums in another order" if begins >= ROUNDING else "other samples, state or random numbers"
    return "ok", f"{text}; from step {first} on: {cause}"


def _same(facts: Rehearsal) -> Judgement | None:
    for resume in (resume for resume in facts.resumes.values() if any(resume.steps.values())):
        begins = {rank: process["begin"][0] for rank, process in resume.after.items()}
        states = {rank: begin["state"] or "none" for rank, begin in begins.items()}
        skipped = {rank: begin["batches"] for rank, begin in begins.items()}
        for text, values in (
            ("continue after steps", resume.steps),
            ("have states of the optimizer", {} if facts.is_sharded else states),
            ("begin with batches", skipped),
        ):
            if len({*values.values()}) > 1:
                by_rank = ", ".join(f"{values[rank]} (rank {rank})" for rank in sorted(values))
                loaded = _named([rank for rank, process in resume.after.items() if process["load"]])
                return "fault", f"{resume.title}: the ranks {text} {by_rank}; {loaded} loaded a file"
        if _failed(resume.run):
            return "fault", f"{resume.title}: {_end(resume.run)}"
    return ("ok", f"in {counted(len(facts.good), 'start')}") if facts.good else None


def _killed(scenario: str, facts: Rehearsal) -> Judgement:
    if not (resume := facts.resumes.get(scenario)):
        return "fault", f"the ranks did not start again: {_end(facts.run(scenario))}"
    if resume.step is None:
        return "unknown", OTHER_WEIGHTS
    lost = f"steps {resume.step + 1} to {resume.reached}" if resume.step < resume.reached else "no step"
    if _failed(resume.run):
        return "fault", f"{lost}, and then {_end(resume.run)}"
    if not resume.step and not facts.ended:
        return "unknown", f"nothing was saved before step {resume.reached}: {LONGER}"
    return ("ok" if resume.step else "fault"), f"{lost}{'' if resume.step else ', so all of them'}"


def _slow(facts: Rehearsal) -> Judgement:
    run = facts.run("slow")
    return ("fault" if _failed(run) else "ok"), f"a rank waits for 2 s; {_end(run)}"


def _disk(facts: Rehearsal) -> Judgement:
    if not (full := [save for save in _all(_ranks(facts.run("disk")), "save") if save["full"] and save["error"]]):
        return "unknown", "no torch.save or dcp.save after the first one could be made to fail"
    after, resume = facts.run("resume", "disk"), facts.resumes.get("disk")
    how = f"the save of step {full[0]['step']} fails at half of its size (RLIMIT_FSIZE): {full[0]['error']}"
    if resume and len(facts.resumes) > 1 and not facts.good:
        return "unknown", f"{how}; but it does not resume without that either"
    if _failed(after) or (resume and resume.step == 0):
        return "fault", f"{how}; then {_end(after) if _failed(after) else 'it begins at step 1'}"
    if resume and resume.step is None:
        return "unknown", OTHER_WEIGHTS
    return "ok", f"{how}; then {f'it resumes after step {resume.step}' if resume else 'no step is left to do'}"


def _other_ranks(facts: Rehearsal) -> Judgement | None:
    run, first, expected = facts.run("ranks", "term"), _ranks(facts.run("term")), facts.resumes.get("term")
    if not run:
        return None
    count, ranks = f"{run['nodes'] * run['ranks']} in place of {len(facts.plain)}", _ranks(run)
    if _failed(run):
        return "fault", f"{count}: {_end(run)}"
    if not expected or not expected.step:
        return "unknown", "it does not resume with the same number of ranks either"
    if facts.is_sharded:
        loads = all(process["load"] for process in ranks.values())
        return ("ok" if loads else "fault"), f"{count}: each loads {'' if loads else 'no '}shards; {_end(run)}"
    resume = _resume("ranks", {rank: first[0] for rank in ranks if 0 in first}, ranks, run)
    step = resume.step if resume else 0
    if step == expected.step:
        return "ok", f"{count}: they continue after step {step}"
    return ("unknown", OTHER_WEIGHTS) if step is None else ("fault", f"{count}: they continue after step {step}")


def _raises(facts: Rehearsal) -> Judgement:
    run = facts.run("raise")
    times = [at["time"] for process in run["processes"] for at in process["at"]]
    if not times:
        return "unknown", f"the script ended before step {run['act']['step']}: {_end(run)}"
    seconds = run["began"] + run["seconds"] - min(times)
    if run["hung"]:
        return "fault", f"{seconds:.0f} s after an exception in rank {run['act']['rank']}, ranks still ran"
    return ("ok" if any(run["codes"]) else "fault"), f"all ended {seconds:.1f} s after it; {_end(run)}"


def _left(facts: Rehearsal) -> Judgement:
    for run in map(facts.run, ("plain", "term", "usr1", "int")):  # the first in which all ranks came to their end
        ends = [end for process in run.get("processes", ()) for end in process["end"]]
        if run and len(ends) >= run["nodes"] * run["ranks"]:
            remains = [*sorted({" ".join(line.split())[:100] for end in ends for line in end["left"]}), *run["left"]]
            text = ", ".join(remains[:3]) + f", and {len(remains) - 3} more" * (len(remains) > 3)
            return ("fault", text) if remains else ("ok", "no process, shared memory or temporary file")
    return "unknown", "the ranks did not come to their end" if facts.ended else f"the run was cut: {LONGER}"


SAVE = """\
import ddpwire.script as ddp  # first, above `import torch`
if ddp.should_stop():  # after each step: the same answer on every rank
    save(step)  # on rank 0
    ddp.stop()"""
RESTORE = """\
state = [torch.load(path) if rank == 0 and path.exists() else None]
dist.broadcast_object_list(state)  # the other nodes may not see rank 0's folder
first = 0
if state[0]:  # not in the first start
    model.module.load_state_dict(state[0]['model']); first = state[0]['step']"""
OPTIMIZER = """\
optimizer.load_state_dict(state[0]['optimizer'])  # saved as optimizer.state_dict()
schedule.load_state_dict(state[0]['schedule'])"""
SKIP = """\
for epoch in range(first // len(loader), epochs):
    sampler.set_epoch(epoch)
    for step, batch in enumerate(loader, epoch * len(loader) + 1):  # if step <= first: continue"""
GROUP = "dist.init_process_group(backend)\nmodel = DistributedDataParallel(model)"
EPOCH = "sampler.set_epoch(epoch)  # at the beginning of each epoch"
SAMPLER = f"sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, sampler=sampler)\n{EPOCH}"
PERIOD = "if rank == 0 and step % every == 0:  # as many steps as you can afford to lose\n    save(step)"
WAIT = 'dist.init_process_group("gloo", timeout=timedelta(minutes=10))'
REPLACE = """\
torch.save(state, path.with_suffix('.new'))
path.with_suffix('.new').replace(path)  # only when it is complete"""
RAISE = "raise  # no collective in `except` or `finally`: the other ranks do not come"
CLEAN = "atexit.register(process.kill)\nwith tempfile.TemporaryDirectory() as folder: ..."
# The id of each row: its question, the scenarios of which any can answer it, the function that answers it, and the
# lines of code that mend a fault.
QUESTIONS: Mapping[str, tuple[str, Sequence[str], Callable[[Rehearsal], Judgement | None], str]] = {
    "group": ("Do all ranks train one model?", PLAIN, _group, GROUP),
    "steps": ("Does it report its steps?", PLAIN, _reports, ""),
    "repeatable": ("Are two undisturbed runs alike?", ("again",), _repeatable, ""),
    "samples": ("Is each sample used once in an epoch?", PLAIN, _samples, SAMPLER),
    "order": ("Is each epoch shuffled anew?", PLAIN, _order, EPOCH),
    "save-term": ("Does it save on SIGTERM?", ("term",), partial(_asked, "term"), SAVE),
    "save-usr1": ("Does it save on SIGUSR1?", ("usr1",), partial(_asked, "usr1"), SAVE),
    "save-int": ("Does it save on Ctrl-C?", ("int",), partial(_asked, "int"), SAVE),
    "resume": ("Does it resume?", STARTS, _resumes, RESTORE),
    "resume-data": ("Does it resume at the right sample?", STARTS, partial(_of_good, _data), SKIP),
    "resume-optimizer": ("Does it restore the optimizer?", STARTS, partial(_of_good, _optimizer), OPTIMIZER),
    "resume-weights": ("Does it go on with the same numbers?", STARTS, _weights, ""),
    "same-checkpoint": ("Do all ranks resume alike?", STARTS, _same, RESTORE),
    "kill-rank": ("What is lost if a rank is killed?", ("kill-rank",), partial(_killed, "kill-rank"), PERIOD),
    "kill-node": ("What is lost with a node?", ("kill-node",), partial(_killed, "kill-node"), PERIOD),
    "slow": ("Does it bear a slow rank?", ("slow",), _slow, WAIT),
    "disk": ("Does a full disk spare the last checkpoint?", ("disk",), _disk, REPLACE),
    "ranks": ("Does it go on with fewer ranks?", ("term",), _other_ranks, RESTORE),
    "raise": ("Does an exception of a rank end all?", ("raise",), _raises, RAISE),
    "left": ("Does it leave nothing behind?", PLAIN, _left, CLEAN),
}


COMPARING = {*QUESTIONS} - {"group", "steps", "samples", "order", "slow", "raise", "left"}
NOT_RUN = "not run"


def judge(runs: Sequence[Facts], interrupted: Sequence[str] = ()) -> list[Row]:
    """Answer the questions whose scenarios were run. If no step was seen, only the first ones can be answered.

    If the rehearsal was ``interrupted``, these scenarios were asked for, and those that were not run are unknown.
    """
    facts, rows = Rehearsal(runs), []
    missing = {name for name in ("plain", "again", *interrupted) if interrupted and not facts.run(name)}
    for name, (question, scenarios, decide, lines) in QUESTIONS.items():
        is_judged = name == "group" if facts.failed else bool(facts.plain) or name in ("group", "steps", "left")
        judgement = decide(facts) if is_judged and facts.run("plain") and any(map(facts.run, scenarios)) else None
        if judgement or missing.intersection(scenarios):
            verdict, evidence = judgement or ("unknown", NOT_RUN)
            if name in COMPARING and not facts.is_repeated:
                verdict, evidence = "unknown", _elsewhere(facts)
            mend = tuple(lines.splitlines()) if verdict == "fault" and not facts.failed else ()
            rows.append(Row(id=name, question=question, verdict=verdict, evidence=evidence, mend=mend))
    return rows
