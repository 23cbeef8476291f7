"""Judges the facts of a rehearsal (``python -m ddprun.rehearsal``): one row for each question. Pure.

A run is a dict: its scenario, the scenario that it follows ("after"), exit codes of its nodes, and for each process
of a rank the facts that the observer recorded, by their kind. A rank's place in the training is known from its weights:
a process that resumes begins with the weights that the run before it had after some step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "fault", "unknown"]
Judgement = tuple[Verdict, str]
Facts = Mapping[str, Any]
SCENARIOS = ("term", "usr1", "int", "kill-rank", "kill-node", "slow", "disk", "raise")
EXCEPTION_LIMIT_S = 20.0  # as in ddprun.rehearsal
DIGITS = 16  # of a double
UNSEEN = "no step of a torch.optim.Optimizer was seen"

SAVE = ("if ddp.should_stop():  # the same answer on every rank", "    save(step)  # on rank 0", "    ddp.stop()")
RESTORE = (
    "state = [torch.load(path) if rank == 0 and path.exists() else None]",
    "dist.broadcast_object_list(state)  # the other nodes may not see rank 0's folder",
    "model.module.load_state_dict(state[0]['model']); first = state[0]['step']",
)
REPLACE = (
    "torch.save(state, path.with_suffix('.new'))",
    "path.with_suffix('.new').replace(path)  # an incomplete file never has the final name",
)
SAMPLER = (
    "sampler = DistributedSampler(dataset)",
    "loader = DataLoader(dataset, batch_size=32, sampler=sampler)",
    "sampler.set_epoch(epoch)  # at the beginning of each epoch",
)
SKIP = (
    "for epoch in range(first // len(loader), epochs):",
    "    sampler.set_epoch(epoch)",
    "    for step, batch in enumerate(loader, epoch * len(loader) + 1):  # if step <= first: continue",
)
PERIOD = ("if rank == 0 and step % 1000 == 0:  # the steps that you can afford to lose", "    save(step)")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The answer to one question."""

    id: str
    question: str
    verdict: Verdict
    evidence: str
    mend: tuple[str, ...]  # lines of code; only for a fault


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A start of the ranks that follows another one: its first step, and what each rank was and is."""

    title: str
    before: Mapping[int, Facts]  # the processes, by rank
    after: Mapping[int, Facts]
    run: Facts

    @property
    def steps(self) -> dict[int, int | None]:
        """Return the step after which each rank continues. 0: from the beginning. None: unknown."""
        return {rank: _place(self.before.get(rank), process) for rank, process in self.after.items()}

    @property
    def step(self) -> int | None:
        """Return the step after which rank 0 continues."""
        return self.steps.get(0)

    @property
    def reached(self) -> int:
        """Return the last step before."""
        return max((len(process["step"]) for process in self.before.values()), default=0)


class Rehearsal:
    """The facts of all runs."""

    def __init__(self, runs: Sequence[Facts]) -> None:
        self.runs = runs
        self.plain = _ranks(self.run("plain"))
        self.again = _ranks(self.run("again"))
        self.ended = bool(self.plain) and not any(process["cut"] for process in self.plain.values())
        self.steps = min((len(process["step"]) for process in self.plain.values()), default=0)
        saves = [save for process in self.plain.values() for save in process["save"] if not save["error"]]
        self.saves = sorted({save["step"] for save in saves})

    def run(self, scenario: str, after: str = "") -> Facts:
        """Return a run, or an empty mapping."""
        return next((run for run in self.runs if (run["scenario"], run["after"]) == (scenario, after)), {})

    def resumes(self) -> Iterator[Resume]:
        """Yield each start that may resume with the same number of ranks."""
        for scenario in ("term", "kill-rank", "kill-node", "disk"):
            first, second = self.run(scenario), self.run("resume", scenario)
            again = _ranks(second) or _ranks(first, 2)
            if again:
                yield Resume(title=scenario, before=_ranks(first, 1), after=again, run=second or first)

    @property
    def is_sharded(self) -> bool:
        """Return whether the ranks hold parts of the weights."""
        return any(process["begin"][0]["sharded"] for process in self.plain.values())

    @property
    def digits(self) -> int:
        """Return the number of digits to which two undisturbed runs are equal."""
        pairs = [(self.plain[rank], self.again[rank]) for rank in self.plain if rank in self.again]
        equal = [
            _digits([one["loss"], *one["probe"]], [two["loss"], *two["probe"]])
            for first, second in pairs
            for one, two in zip(first["step"], second["step"], strict=False)
        ]
        return min(equal, default=0)


def _ranks(run: Facts, attempt: int = 1) -> dict[int, Facts]:
    """Return the processes that took steps, by rank, of an attempt."""
    processes = [process for process in run.get("processes", ()) if process["begin"]]
    return {process["rank"]: process for process in processes if process["start"][0]["attempt"] == attempt}


def _place(before: Facts | None, after: Facts) -> int | None:
    weights = after["begin"][0]["weights"]
    for step in reversed(before["step"] if before else ()):
        if step["weights"] == weights:
            return int(step["step"])
    if not after["load"] or (before and before["begin"][0]["weights"] == weights):
        return 0
    return None


def _digits(first: Sequence[float | None], second: Sequence[float | None]) -> int:
    """Return the number of equal digits, and DIGITS if the numbers are equal."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
    largest = max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b and not math.isnan(a - b)), default=0.0)
    return DIGITS if not largest else max(0, min(DIGITS - 1, int(-math.log10(largest))))


def _to(digits: int) -> str:
    return "bit for bit" if digits == DIGITS else f"to {digits} digits" if digits else "in no digit"


def _batch(step: Facts) -> Sequence[int]:
    """Return the samples of the last batch before a step."""
    return step["batches"][-1][1] if step["batches"] else ()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _end(run: Facts) -> str:
    if run["hung"]:
        return "it hung, and was killed"
    code = next((code for code in run["codes"] if code), 0)
    message = run["outcome"]
    return f"it ended with exit code {code}{f': {message}' if code and message else ''}"


# The questions. A function returns None if its scenario was not run.


def _group(facts: Rehearsal) -> Judgement:
    run = facts.run("plain")
    world, grouped = run["nodes"] * run["ranks"], [process for process in run["processes"] if process["group"]]
    if not facts.plain:
        return "unknown", f"{UNSEEN}; {_end(run)}"
    if world == 1 and len(facts.plain) == 1:
        return "ok", "there is one rank"
    if missing := [rank for rank, process in facts.plain.items() if not process["group"]]:
        return "fault", f"{_named(missing)} took steps without init_process_group, and trained models of their own"
    sizes = {process["group"][0]["world"] for process in grouped}
    if sizes != {len(facts.plain)}:
        return "fault", f"{len(facts.plain)} ranks are in groups of {', '.join(map(str, sorted(sizes)))}"
    last = {process["step"][facts.steps - 1]["weights"] for process in facts.plain.values()}
    if len(last) > 1 and not facts.is_sharded:
        return "fault", f"after step {facts.steps} the ranks have different weights, and no shards of them"
    return "ok", f"{len(facts.plain)} ranks in one group, with {'shards of the' if facts.is_sharded else 'equal'} weights"


def _reports(facts: Rehearsal) -> Judgement:
    reported = max((step["reported"] for process in facts.plain.values() for step in process["step"]), default=0)
    seen = f"{facts.steps} steps{'' if facts.ended else ' (then the run was cut: see --steps)'}"
    if not facts.plain:
        return "unknown", UNSEEN
    return "ok", f"{seen}, reported by ddp.progress" if reported else f"{seen}, recognised by Optimizer.step; not reported"


def _repeatable(facts: Rehearsal) -> Judgement:
    if not facts.digits:
        return "unknown", "two undisturbed runs differ in every digit: the script takes other random numbers in each run"
    return "ok", f"two undisturbed runs have the same losses and weights {_to(facts.digits)} (with equal seeds)"


def _epochs(facts: Rehearsal) -> dict[int, dict[int, list[Sequence[int]]]]:
    """Return the batches of each rank in each whole epoch in which all ranks took steps."""
    epochs: dict[int, dict[int, list[Sequence[int]]]] = {}
    for rank, process in facts.plain.items():
        batches = [batch for step in process["step"] for batch in step["batches"]]
        trained = {epoch for epoch, _ in batches}
        batches += [batch for end in process["epoch"] for batch in end["batches"]]
        for number, end in enumerate(end for end in process["epoch"] if end["epoch"] in trained):
            epochs.setdefault(number, {})[rank] = [indices for epoch, indices in batches if epoch == end["epoch"]]
    return {number: ranks for number, ranks in epochs.items() if len(ranks) == len(facts.plain)}


def _blind(facts: Rehearsal) -> str:
    if not any(process["loader"] for process in facts.plain.values()):
        return "no DataLoader was used"
    if not any(_batch(step) for process in facts.plain.values() for step in process["step"]):
        return "the DataLoader has no sampler, so its samples have no numbers"
    return ""


def _samples(facts: Rehearsal) -> Judgement:
    if why := _blind(facts):
        return "unknown", why
    for number, ranks in _epochs(facts).items():
        counts = Counter(index for batches in ranks.values() for batch in batches for index in batch)
        largest = max(len(batch) for batches in ranks.values() for batch in batches)
        allowed, extra = largest * len(ranks), counts.total() - len(counts)
        if extra > allowed:
            sample, times = counts.most_common(1)[0]
            return "fault", f"epoch {number + 1}: {extra} of {counts.total()} are repetitions; sample {sample} is used {times} times"
        if len(counts) + allowed < max(counts) + 1:
            return "fault", f"epoch {number + 1}: {max(counts) + 1 - len(counts)} of {max(counts) + 1} samples are not used"
    if not _epochs(facts):
        return "unknown", f"no epoch ended within {facts.steps} steps: use a larger --steps"
    return "ok", f"{len(_epochs(facts))} epochs: no sample twice or left out, except to fill or drop the last batch"


def _order(facts: Rehearsal) -> Judgement:
    if why := _blind(facts):
        return "unknown", why
    orders = [[index for batch in ranks[0] for index in batch] for ranks in _epochs(facts).values() if 0 in ranks]
    if len(orders) < 2:
        return "unknown", f"fewer than two epochs ended within {facts.steps} steps: use a larger --steps"
    if orders[0] == orders[1] and orders[0] != sorted(orders[0]):
        return "fault", f"epochs 1 and 2 are shuffled alike: rank 0 begins both with {orders[0][:4]}"
    return "ok", "in order, not shuffled" if orders[0] == orders[1] else "each epoch is shuffled anew"


def _asked(scenario: str, name: str) -> Callable[[Rehearsal], Judgement | None]:
    def judge(facts: Rehearsal) -> Judgement | None:
        run = facts.run(scenario)
        if not run:
            return None
        before, asked = _ranks(run), run["signalled"]
        if not asked:
            return "unknown", f"the script ended before step {run['act']['step']}: {_end(run)}"
        later = [save for process in before.values() for save in process["save"] if save["time"] > asked]
        reached = max((len(process["step"]) for process in before.values()), default=0)
        seconds = max([save["time"] for save in later], default=0.0) - asked
        files = [file for process in before.values() for file in process["file"] if file["time"] > asked]
        lost = f"{reached - max([save for save in facts.saves if save < reached], default=0)} of {reached} steps are lost"
        resume = next((one for one in facts.resumes() if one.title == scenario), None)
        if any(not save["error"] for save in later) or (resume and resume.step == reached) or (files and not resume):
            if resume and resume.step is not None and resume.step < run["act"]["step"]:
                return "fault", f"asked at step {run['act']['step']}, but it resumes at step {resume.step}: {_end(run)}"
            return "ok", f"asked at step {run['act']['step']}: saved step {reached} within {max(seconds, 0.0):.1f} s; {_end(run)}"
        if scenario == "usr1" and (other := _asked("term", "SIGTERM")(facts)) and other[0] == "ok":
            return "ok", f"not saved ({lost}), but ddpctl sends it only if stop_signal is USR1; SIGTERM saves"
        return "fault", f"{name} at step {run['act']['step']}: not saved, {lost}; {_end(run)}"

    return judge


def _resumes(facts: Rehearsal) -> Judgement | None:
    resumes = [*facts.resumes()]
    if not resumes:
        return None
    places = [(one, one.step) for one in resumes]
    if done := [(one, step) for one, step in places if step]:
        return "ok", ", ".join(f"after {one.title} at step {step} of {one.reached}" for one, step in done)
    if any(step is None for _, step in places):
        one = next(one for one, step in places if step is None)
        return "unknown", f"after {one.title} it loads a file, but begins with weights that no step before had"
    if not facts.saves and not facts.ended:
        return "unknown", f"nothing was saved within {facts.steps} steps: use a larger --steps"
    return "fault", f"each start begins at step 1; {'nothing was saved' if not facts.saves else f'saved at {facts.saves[:4]}'}"


def _good(facts: Rehearsal) -> list[Resume]:
    return [one for one in facts.resumes() if one.step]


def _judged(facts: Rehearsal, judge: Callable[[Rehearsal, Resume], Judgement]) -> Judgement | None:
    """Return the worst judgement about the resumes, or None if none was to be made."""
    if not any(facts.resumes()):
        return None
    judgements = [(judge(facts, one), one) for one in _good(facts)]
    if not judgements:
        return "unknown", "it did not resume"
    order = ("fault", "unknown", "ok")
    (verdict, evidence), worst = min(judgements, key=lambda pair: order.index(pair[0][0]))
    return verdict, f"after {worst.title}: {evidence}" if verdict != "ok" else evidence


def _pairs(facts: Rehearsal, one: Resume, rank: int) -> Iterator[tuple[int, Facts, Facts]]:
    """Yield the steps after a resume: the number, the step of the undisturbed run, and that of the resumed one."""
    start, reference = one.step or 0, facts.plain.get(rank, {"step": ()})["step"]
    for number, step in enumerate(one.after[rank]["step"], start + 1):
        if number <= len(reference):
            yield number, reference[number - 1], step


def _data(facts: Rehearsal, one: Resume) -> Judgement:
    if why := _blind(facts):
        number, plain, step = next(_pairs(facts, one, 0))
        if facts.digits and (same := _digits([plain["loss"]], [step["loss"]])) >= min(facts.digits, 6):
            return "ok", f"no DataLoader; the loss of step {number} is that of the undisturbed run {_to(same)}"
        return "unknown", f"{why}, and the loss of step {number} differs from the undisturbed run: other data or random numbers"
    start = one.step or 0
    for rank in one.after:
        before, reference = one.before[rank]["step"], facts.plain[rank]["step"]
        within = start < len(reference) and reference[start]["batches"][-1:] and reference[start - 1]["batches"][-1:]
        if not within or reference[start]["batches"][-1][0] != reference[start - 1]["batches"][-1][0]:
            continue  # it resumes at the beginning of an epoch
        for was, plain in zip(before, reference, strict=False):
            if _batch(was) != _batch(plain):
                return "fault", (
                    f"each start shuffles differently (step {was['step']} of rank {rank}: samples {list(_batch(was))[:3]}, "
                    f"and {list(_batch(plain))[:3]} in the undisturbed run), so the rest of an epoch repeats and skips samples"
                )
        for number, plain, step in _pairs(facts, one, rank):
            if _batch(step) != _batch(plain):
                other = next((old["step"] for old in reference if _batch(old) == _batch(step)), None)
                place = f"the samples of step {other}" if other else f"other samples ({list(_batch(step))[:3]})"
                return "fault", f"resumed at step {start}, rank {rank} uses in step {number} {place} of the undisturbed run"
    return "ok", f"resumed at step {start}: the same samples as in the undisturbed run"


def _optimizer(facts: Rehearsal, one: Resume) -> Judgement:
    start = one.step or 0
    for rank, process in one.after.items():
        begin, was = process["begin"][0], one.before[rank]["step"][start - 1]
        if begin["state"] != was["state"]:
            how = "is empty" if not begin["state"] else "is another one"
            return "fault", f"resumed at step {start}, the optimizer's state of rank {rank} {how} (momentum, averages)"
        for number, plain, step in _pairs(facts, one, rank):
            if _digits(step["lr"], plain["lr"]) < 6:
                return "fault", f"step {number} has learning rate {step['lr'][0]:g}, and {plain['lr'][0]:g} in the undisturbed run"
    return "ok", "the optimizer's state and the learning rates are those of the step before"


def _weights(facts: Rehearsal, one: Resume) -> Judgement:
    pairs = [(number, plain, step) for rank in one.after for number, plain, step in _pairs(facts, one, rank)]
    if not pairs:
        return "unknown", "it took no step that the undisturbed run took"
    if not facts.digits:
        return "unknown", "two undisturbed runs differ in every digit, so nothing can be compared"
    equal = min(_digits([a["loss"], *a["probe"]], [b["loss"], *b["probe"]]) for _, a, b in pairs)
    last = max(number for number, _, _ in pairs)
    why = ""
    if equal < facts.digits:
        first = min(n for n, a, b in pairs if _digits([a["loss"], *a["probe"]], [b["loss"], *b["probe"]]) == equal)
        kind = "sums in another order" if equal > 5 else "random numbers that are not saved, such as dropout"
        why = f"; the largest difference is in step {first}. If samples and optimizer are right: {kind}"
    return "ok", f"steps {(one.step or 0) + 1} to {last} are those of the undisturbed run {_to(equal)}{why}"


def _same(facts: Rehearsal) -> Judgement | None:
    resumes = [one for one in facts.resumes() if any(one.steps.values())]
    if not any(facts.resumes()):
        return None
    for one in resumes:
        steps = one.steps
        begins = {rank: process["begin"][0] for rank, process in one.after.items()}
        for what, values in (
            ("continue after step", steps),
            ("have optimizer states", {rank: begin["state"] or "none" for rank, begin in begins.items()}),
            ("skip batches:", {rank: begin["batches"] for rank, begin in begins.items()}),
        ):
            if len({*map(str, values.values())}) > 1 and not (facts.is_sharded and what == "have optimizer states"):
                loads = [rank for rank, process in one.after.items() if process["load"]]
                text = ", ".join(f"{rank}: {value}" for rank, value in sorted(values.items()))
                return "fault", f"after {one.title}, the ranks {what} {text}; a file is loaded by {_named(loads) or 'none'}"
        if one.run["hung"] or any(one.run["codes"]):
            return "fault", f"after {one.title}: {_end(one.run)}"
    return ("ok", f"all ranks in {len(resumes)} starts") if resumes else ("unknown", "it did not resume")


def _killed(scenario: str) -> Callable[[Rehearsal], Judgement | None]:
    def judge(facts: Rehearsal) -> Judgement | None:
        if not (run := facts.run(scenario)):
            return None
        one = next((one for one in facts.resumes() if one.title == scenario), None)
        if one is None:
            return "unknown" if not run["act"] else "fault", f"the ranks did not start again: {_end(run)}"
        if one.step is None:
            return "unknown", "it loads a file, but begins with weights that no step before had"
        lost = f"{one.reached - one.step} of {one.reached} steps are lost"
        if one.run["hung"] or any(one.run["codes"]):
            return "fault", f"{lost}, and then {_end(one.run)}"
        if not one.step and not [save for save in facts.saves if save < one.reached] and not facts.ended:
            return "unknown", f"nothing was saved before step {one.reached}: use a larger --steps"
        return ("ok" if one.step else "fault"), f"{lost}{'' if one.step else ': it begins at step 1'}"

    return judge


def _slow(facts: Rehearsal) -> Judgement | None:
    if not (run := facts.run("slow")):
        return None
    ranks = _ranks(run)
    if run["hung"] or any(run["codes"]) or len(ranks) < len(facts.plain):
        return "fault", f"a rank that waits for 2 s ends the run: {_end(run)}"
    return "ok", "a rank that waits for 2 s only delays the others"


def _disk(facts: Rehearsal) -> Judgement | None:
    if not (run := facts.run("disk")):
        return None
    full = [save for process in _ranks(run).values() for save in process["save"] if save["full"]]
    if not full:
        return "unknown", "no torch.save or dcp.save followed an earlier one, so no disk was full"
    how = f"the write of step {full[0]['step']} fails at half of its size (RLIMIT_FSIZE); {_end(run)}"
    one = next((one for one in facts.resumes() if one.title == "disk"), None)
    if one and one.step and not any(one.run["codes"]):
        return "ok", f"{how}; then it resumes at step {one.step}"
    if one and one.step is None:
        return "unknown", f"{how}; then it begins with weights that no step before had"
    after = facts.run("resume", "disk")
    return "fault", f"{how}; then {'it begins at step 1' if one and not any(after['codes']) else _end(after)}"


def _other_ranks(facts: Rehearsal) -> Judgement | None:
    if not (run := facts.run("ranks", "term")):
        return None
    first, ranks = _ranks(facts.run("term")), _ranks(run)
    count = f"with {run['nodes'] * run['ranks']} rank{'s' * (run['nodes'] * run['ranks'] > 1)}"
    if run["hung"] or any(run["codes"]):
        return "fault", f"{count}: {_end(run)}"
    if not _good(facts):
        return "unknown", "it did not resume with the same number of ranks either"
    if facts.is_sharded:
        loaded = any(process["load"] for process in ranks.values())
        return ("ok" if loaded else "unknown"), f"{count}: it loads a checkpoint and ends; shards cannot be compared"
    one = Resume(title="ranks", before={rank: first[0] for rank in ranks if 0 in first}, after=ranks, run=run)
    expected = next((other.step for other in _good(facts) if other.title == "term"), None)
    if one.step and one.step == (expected or one.step):
        return "ok", f"{count}: it resumes at step {one.step}"
    return ("fault" if one.step == 0 else "unknown"), f"{count}: it begins {'at step 1' if one.step == 0 else 'with other weights'}"


def _raises(facts: Rehearsal) -> Judgement | None:
    if not (run := facts.run("raise")):
        return None
    acts = [at["time"] for process in run["processes"] for at in process["at"]]
    if not acts:
        return "unknown", f"the script ended before step {run['act']['step']}"
    seconds = run["began"] + run["seconds"] - acts[0]
    if run["hung"]:
        return "fault", f"rank {run['act']['rank']} raised an exception; {EXCEPTION_LIMIT_S:g} s later the ranks still ran"
    if not any(run["codes"]):
        return "fault", "a rank raised an exception, but the run ended with exit code 0"
    return "ok", f"all ranks ended {seconds:.1f} s after the exception"


def _left(facts: Rehearsal) -> Judgement:
    run = facts.run("plain")
    ends = [end for process in run["processes"] for end in process["end"]]
    processes = sorted({line for end in ends for line in end["left"]})
    if left := [*processes, *run["left"], *run["tmp"]]:
        return "fault", f"{len(left)} processes or files, such as {left[0]}"
    if not ends:
        return "unknown", "the run was cut before its end: use a larger --steps"
    return "ok", "no process, shared memory or temporary file"


Judge = Callable[[Rehearsal], Judgement | None]
QUESTIONS: Mapping[str, tuple[str, Judge, tuple[str, ...]]] = {
    "group": ("Do all ranks train one model?", _group, (
        'dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
        "model = DistributedDataParallel(model)",
    )),
    "steps": ("Does it report its steps?", _reports, ()),
    "repeatable": ("Are two undisturbed runs alike?", _repeatable, ()),
    "samples": ("Is each sample used once in an epoch?", _samples, SAMPLER),
    "order": ("Is each epoch shuffled anew?", _order, SAMPLER[2:]),
    "save-term": ("Does it save on SIGTERM?", _asked("term", "SIGTERM"), SAVE),
    "save-usr1": ("Does it save on SIGUSR1?", _asked("usr1", "SIGUSR1"), SAVE),
    "save-int": ("Does it save on Ctrl-C?", _asked("int", "Ctrl-C"), SAVE),
    "resume": ("Does it resume?", _resumes, RESTORE),
    "resume-data": ("Does it resume at the right sample?", lambda facts: _judged(facts, _data), SKIP),
    "resume-optimizer": ("Does it restore the optimizer?", lambda facts: _judged(facts, _optimizer), (
        "optimizer.load_state_dict(state[0]['optimizer'])  # saved as optimizer.state_dict()",
        "schedule.load_state_dict(state[0]['schedule'])",
    )),
    "resume-weights": ("Are losses and weights the same?", lambda facts: _judged(facts, _weights), ()),
    "same-checkpoint": ("Do all ranks resume alike?", _same, RESTORE),
    "kill-rank": ("What does the kill of a rank lose?", _killed("kill-rank"), PERIOD),
    "kill-node": ("What does the loss of a node lose?", _killed("kill-node"), PERIOD),
    "slow-rank": ("Does it bear a slow rank?", _slow, (
        'dist.init_process_group("gloo", timeout=timedelta(minutes=10))',
    )),
    "full-disk": ("Does a full disk spare the last checkpoint?", _disk, REPLACE),
    "other-ranks": ("Does it go on with fewer ranks?", _other_ranks, RESTORE),
    "exception": ("Does an exception of a rank end all?", _raises, (
        "# no collective in `except` or `finally`: the other ranks do not come",
        "raise  # ddprun ends the other ranks",
    )),
    "left": ("Does it leave nothing behind?", _left, (
        "process = subprocess.Popen(...); atexit.register(process.kill)",
        "with tempfile.TemporaryDirectory() as folder: ...",
    )),
}  # fmt: skip


def judge(runs: Sequence[Facts]) -> list[Row]:
    """Answer the questions whose scenarios were run. If no step was seen, only the first ones can be answered."""
    facts, rows = Rehearsal(runs), []
    for name, (question, decide, mend) in QUESTIONS.items():
        if not facts.plain and name not in ("group", "steps", "left"):
            continue
        if judgement := decide(facts):
            verdict, evidence = judgement
            rows.append(Row(id=name, question=question, verdict=verdict, evidence=evidence, mend=mend * (verdict == "fault")))
    return rows
