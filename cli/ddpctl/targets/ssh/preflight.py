"""What was found out about every host, and whether a run may start: checked for all hosts at once. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.images import Image, difference, read_inspect
from ddpctl.launch_plan import counted
from ddpctl.spec import JobSpec, size_bytes
from ddpctl.targets import CpuRun, GpuReport, HostReport
from ddpctl.targets.ssh.claims import Claim, Ticket, parse_claims, parse_tickets
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.text import format_duration, one_line, table
from ddpwire.exits import Exit

CLOCK_S = 5.0  # a larger offset is told; what it breaks is the order of log lines, not the training
GIB = 1 << 30
Wrong = tuple[int, type[DdpctlError], str]  # which host, what kind of error, the sentence


class GpusTakenError(UnavailableError):
    """A host has the GPUs, but not now."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is to be said of hosts before a launch."""

    hosts: tuple[SshHost, ...]
    facts: tuple["Facts", ...]
    cuda: bool  # whether the ranks take GPUs
    wrong: tuple[Wrong, ...]
    rows: tuple[str, ...]  # a table

    def kinds(self, number: int) -> set[type[DdpctlError]]:
        """What is wrong with one host; nothing: it is ready."""
        return {kind for one, kind, _ in self.wrong if one == number}

    def why(self, number: int) -> str:
        """The same in a sentence."""
        return "; ".join(text for one, _, text in self.wrong if one == number)

    def refusal(self, *, need: int, dry_run: bool = False) -> DdpctlError:
        """The error that says all of it. ``need``: so many hosts; ``dry_run``: nothing was to be started."""
        bad = len({number for number, _, _ in self.wrong})
        kind = ConfigError if all(kind is ConfigError for _, kind, _ in self.wrong) else UnavailableError
        head = f"{'' if dry_run else 'nothing was started: '}{bad} of {len(self.hosts)} hosts "
        head += "is not ready" if bad == 1 else "are not ready"
        if need < len(self.hosts):
            head += f", and {need} {'is' if need == 1 else 'are'} needed"
        sentences = [one_line(f"{self.hosts[number].address}: {text}") for number, _, text in self.wrong]
        return kind("\n".join([head, *(f"  {row}" for row in self.rows), *sentences]))

    def clock_warnings(self, chosen: Iterable[int]) -> tuple[str, ...]:
        """A line for each of the chosen hosts whose clock is off."""
        return tuple(
            f"{self.hosts[number].address}: its clock is {ahead:+.0f} s off this machine's"
            for number in chosen
            if (ahead := self.facts[number].clock_s) is not None and abs(ahead) > CLOCK_S
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one host said of itself."""

    words: dict[str, tuple[str, ...]]  # each word's values, as scripts.facts_script prints them
    failure: str = ""  # why it printed nothing
    clock_s: float | None = None  # ahead of this machine

    def get(self, word: str) -> str:
        """The first value, or nothing."""
        return self.words.get(word, ("",))[0]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs."""
        return self.words.get("gpu", ())

    @property
    def free_gpus(self) -> tuple[str, ...]:
        """Those on which nothing computes, and which no run has."""
        taken = {*self.words.get("busy", ()), *(gpu for claim in self.claims for gpu in claim.gpus)}
        return tuple(gpu for gpu in self.gpus if gpu not in taken)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The runs that are there."""
        return parse_claims(self.words.get("claim", ()))

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The launches that wait there, in their order."""
        return parse_tickets(self.words.get("ticket", ()))

    def ahead(self, uid: str) -> tuple[str, ...]:
        """The launches that come before this one, which may have no ticket."""
        return tuple(ticket.run for ticket in takewhile(lambda ticket: ticket.uid != uid, self.tickets))

    @property
    def now(self) -> int:
        """The host's time; 0: it did not say it."""
        return int(self.get("now")) if self.get("now").isdecimal() else 0

    @property
    def image(self) -> Image | None:
        """The job's image as the engine there has it, or None where it does not."""
        try:
            return read_inspect(self.get("asked"), self.get("image")) if self.get("image") else None
        except ValueError:
            return None

    @property
    def image_id(self) -> str:
        """``sha256:…`` of the image, or nothing where it is not there."""
        return self.image.id if self.image else ""

    @property
    def address(self) -> str:
        """The address at which this machine has reached it."""
        return (self.get("ssh").split() or ["", "", ""])[2] if len(self.get("ssh").split()) > 2 else ""


def parse_facts(output: Output) -> Facts:
    """What ``scripts.facts_script`` printed; a host that did not come to its end has failed."""
    words: dict[str, tuple[str, ...]] = {}
    for line in output.stdout.splitlines():
        word, _, value = line.partition(" ")
        words[word] = (*words.get(word, ()), value.strip())
    if "end" in words:
        return Facts(words=words)
    return Facts(words=words, failure=one_line(output.last_line("it printed nothing")))


def clocks(facts: Sequence[Facts], here: Output, there: Sequence[Output]) -> tuple[Facts, ...]:
    """The facts with how far each clock is ahead of this machine's, where both said their time."""

    def seconds(output: Output) -> float | None:
        try:
            return float(output.stdout)
        except ValueError:
            return None

    now = seconds(here)
    times = [seconds(output) for output in there]
    return tuple(
        fact if now is None or time is None else replace(fact, clock_s=time - now)
        for fact, time in zip(facts, times, strict=True)
    )


def judge(
    options: SshOptions, job: JobSpec, hosts: Sequence[SshHost], facts: Sequence[Facts], script: str | None, uid: str
) -> Judgement:
    """What is wrong with each host. ``uid``: of the launch, whose own ticket is not in its way."""
    cuda = job.device == "cuda" or (job.device == "auto" and any(fact.gpus or fact.get("gpu_error") for fact in facts))
    wrong: list[Wrong] = []
    for number, (host, fact) in enumerate(zip(hosts, facts, strict=True)):
        found = (
            _alone(options, job, host, fact, script, cuda, uid)
            if not fact.failure
            else [(UnavailableError, fact.failure)]
        )
        wrong += [(number, kind, text) for kind, text in found]
    if options.runtime != "none":
        wrong += [(number, ConfigError, text) for number, text in _images(job.image, hosts, facts)]
    rows = table(list(_rows(options, hosts, facts, {number for number, _, _ in wrong})))
    wrong.sort(key=lambda one: one[0])
    return Judgement(hosts=tuple(hosts), facts=tuple(facts), cuda=cuda, wrong=tuple(wrong), rows=tuple(rows))


def _alone(
    options: SshOptions, job: JobSpec, host: SshHost, fact: Facts, script: str | None, cuda: bool, uid: str
) -> Iterator[tuple[type[DdpctlError], str]]:
    """What is wrong with one host."""
    if fact.get("engine_error"):
        what = f"{options.python} there" if options.runtime == "none" else options.runtime
        yield UnavailableError, f"{what}: {fact.get('engine_error')}"
    if not fact.get("flock"):
        yield UnavailableError, "flock is missing there: install util-linux"
    if not fact.get("writable"):
        yield UnavailableError, f"{options.home} cannot be written there: set the target's 'home' to a folder that can"
    free = int(fact.get("disk") or 0) * 1024
    if free < size_bytes(options.min_disk):
        yield (
            UnavailableError,
            f"its disk is full: {free / GIB:.1f} GiB free where runs are kept ({options.home}), "
            f"{size_bytes(options.min_disk) / GIB:g} GiB needed (min_disk)",
        )
    yield from _gpus(options, job, host, fact, cuda, uid)
    looked = options.runtime == "none" or options.project.startswith(("/", "~"))
    if script and looked and options.project != "sync" and not fact.get("script"):
        folder = "the home folder" if options.project == "none" else options.project
        yield (
            ConfigError,
            f"{script}: no such script in {folder} there: give its path, or let 'project: sync' send this folder",
        )


def _gpus(
    options: SshOptions, job: JobSpec, host: SshHost, fact: Facts, cuda: bool, uid: str
) -> Iterator[tuple[type[DdpctlError], str]]:
    if not cuda:
        return
    if failure := fact.get("gpu_error"):
        yield UnavailableError, f"nvidia-smi failed there: {failure}: mend the driver, or --device cpu for CPU ranks"
        return
    allowed = len(fact.gpus) if host.gpus is None else min(host.gpus, len(fact.gpus))
    if allowed < job.gpus:
        has = counted(len(fact.gpus), "GPU") + (
            f", of which a run may have {host.gpus}" if host.gpus is not None else ""
        )
        yield ConfigError, f"it has {has}, {job.gpus} needed: ask for fewer, or --device cpu for CPU ranks"
    elif fact.get("claims_error"):
        yield UnavailableError, f"who has its GPUs is unknown: {fact.get('claims_error')}"
    elif len(fact.free_gpus) < job.gpus:
        yield GpusTakenError, _taken(job, fact)
    elif ahead := fact.ahead(uid):
        waits = "waits" if len(ahead) == 1 else "wait"
        yield GpusTakenError, f"{', '.join(ahead)} {waits} for its GPUs: --wait 2h takes the next place in line"
    if options.runtime == "docker" and "nvidia" not in fact.get("runtimes"):
        yield UnavailableError, "docker has no NVIDIA runtime there: install nvidia-container-toolkit"


def _taken(job: JobSpec, fact: Facts) -> str:
    """Who has the GPUs."""
    verb = "is" if len(fact.free_gpus) == 1 else "are"
    who = [
        f"the run {claim.run} has {len(claim.gpus)}, for {format_duration(fact.now - claim.since)}"
        for claim in fact.claims
        if claim.gpus
    ]
    if len(fact.gpus) - len(fact.free_gpus) > sum(len(claim.gpus) for claim in fact.claims):
        who.append("others compute on the rest (nvidia-smi)")
    return (
        f"{len(fact.free_gpus)} of its {counted(len(fact.gpus), 'GPU')} {verb} free, {job.gpus} needed: "
        f"{', '.join(who)}; --wait 2h waits for them"
    )


def _images(image: str, hosts: Sequence[SshHost], facts: Sequence[Facts]) -> Iterator[tuple[int, str]]:
    """All hosts must hold one image: the same ID, or a digest in common. Yields each host that does not."""
    first: tuple[str, Image] | None = None
    for number, (host, fact) in enumerate(zip(hosts, facts, strict=True)):
        if fact.failure or not fact.get("engine"):
            continue
        if (found := fact.image) is None:
            yield number, f"it does not have the image {image}: ddpctl image ship sends it, or pull it there"
        elif first is None:
            first = (host.address, found)
        elif why := difference(first[1], found):
            yield number, f"{why}, as on {first[0]}: give all hosts the same one (ddpctl image ship)"


def _rows(
    options: SshOptions, hosts: Sequence[SshHost], facts: Sequence[Facts], bad: set[int]
) -> Iterator[tuple[str, ...]]:
    yield ("HOST", "SSH", options.runtime.upper() if options.runtime != "none" else "PYTHON", "IMAGE", "GPUS FREE",
           "DISK FREE", "CLOCK", "STATE")  # fmt: skip
    for number, (host, fact) in enumerate(zip(hosts, facts, strict=True)):
        state = "not ready" if number in bad else "ready"
        if fact.failure:
            yield (host.address, "no", "-", "-", "-", "-", "-", state)
            continue
        yield (
            host.address,
            "yes",
            fact.get("engine").removeprefix("Python ") or "no",
            "-" if options.runtime == "none" else fact.image_id.removeprefix("sha256:")[:12] or "no",
            f"{len(fact.free_gpus)} of {len(fact.gpus)}",
            f"{int(fact.get('disk') or 0) * 1024 / GIB:.0f} GiB",
            "-" if fact.clock_s is None else f"{fact.clock_s:+.1f} s",
            state,
        )


def host_report(host: SshHost, output: Output) -> HostReport:
    """What a host answered to ``scripts.hosts_script``."""
    fact = parse_facts(output)
    if failure := fact.failure or fact.get("gpu_error") or fact.get("claims_error"):
        return HostReport(host=host.address, failure=failure)
    holders = {gpu: claim for claim in fact.claims for gpu in claim.gpus}
    use = {uuid: numbers for uuid, *numbers in (line.replace(",", " ").split() for line in fact.words.get("use", ()))}

    def number(gpu: str, place: int) -> int | None:
        text = use.get(gpu, ())[place : place + 1]
        return int(text[0]) if text and text[0].isdecimal() else None

    load = fact.get("load").split()
    return HostReport(
        host=host.address,
        time=fact.now,
        load=float(load[0]) if len(load) == 2 else None,
        cores=int(load[1]) if len(load) == 2 else None,
        gpus=tuple(
            GpuReport(
                uuid=gpu,
                computes=gpu in fact.words.get("busy", ()),
                run=holders[gpu].run if gpu in holders else None,
                since=holders[gpu].since if gpu in holders else None,
                busy_percent=number(gpu, 0),
                memory_mib=number(gpu, 1),
                total_mib=number(gpu, 2),
            )
            for gpu in fact.gpus
        ),
        cpu_runs=tuple(CpuRun(run=claim.run, since=claim.since) for claim in fact.claims if not claim.gpus),
        waiting=tuple(ticket.run for ticket in fact.tickets),
    )


def report(output: Output) -> Any:
    """What scripts.show printed, or None where the host could not say it."""
    try:
        return json.loads(output.stdout) if output.returncode == Exit.OK else None
    except ValueError:
        return None
