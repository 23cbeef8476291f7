"""Parses what hosts have reported about themselves, and finds reasons why a run cannot start on them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.files.images import Image, difference, read_inspect
from ddpctl.job.launch_plan import Plan, script_of
from ddpctl.job.spec import size_bytes
from ddpctl.targets import CpuRun, GpuReport, HostReport
from ddpctl.targets.ssh.claims import Claim, parse_claims
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.scripts import SHOWN
from ddpctl.text import counted, format_duration, one_line, table
from ddpwire.exits import Exit
from ddpwire.machine import GIB, format_free

CLOCK_S = 5.0  # a larger offset causes a warning, because log lines may be in the wrong order
NO_ERROR = "the shell there ended early, without an error message"
Problem = tuple[type[DdpctlError], str, str]  # the type of the error, what was checked, the message


class GpusTakenError(UnavailableError):
    """A host has enough GPUs, but too few of them are free at present."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of all checks of the hosts before a launch."""

    hosts: tuple[SshHost, ...]
    facts: tuple["Facts", ...]
    cuda: bool  # whether the ranks use GPUs
    wrong: tuple[tuple[Problem, ...], ...]  # the problems of each host
    rows: tuple[str, ...]  # a table of the hosts

    def kinds(self, number: int) -> set[type[DdpctlError]]:
        """Return the types of a host's problems, or an empty set if it is ready. ``number``: the host's position."""
        return {kind for kind, _, _ in self.wrong[number]}

    def why(self, number: int) -> str:
        """Return the problems of a host as one line. ``number``: the host's position."""
        return "; ".join(text for _, _, text in self.wrong[number])

    @property
    def machines(self) -> dict[str, list[tuple[str, str]]]:
        """The failed checks of each host, with their messages."""
        pairs = zip(self.hosts, self.wrong, strict=True)
        return {host.address: [(check, text) for _, check, text in wrong] for host, wrong in pairs}

    def refusal(self, *, need: int, dry_run: bool = False) -> DdpctlError:
        """Return one error with the problems of all hosts. ``need``: how many hosts are needed."""
        number, bad = len(self.hosts), sum(map(bool, self.wrong))
        kinds = {kind for number in range(number) for kind in self.kinds(number)}
        order = (UnavailableError, ConfigError, NoInputError)
        raised = next(error for error in order if any(issubclass(kind, error) for kind in kinds))
        head = "" if dry_run else "nothing was started: "
        if need < number:
            good = number - bad
            head += f"{'only ' if good else ''}{good} of {number} hosts {'is' if good == 1 else 'are'} ready, "
            head += f"but {need} {'is' if need == 1 else 'are'} needed"
        else:
            head += f"{bad} of {number} hosts {'is' if bad == 1 else 'are'} not ready"
        sentences = [one_line(f"{host}: {text}") for host, wrong in self.machines.items() for _, text in wrong]
        return raised("\n".join([head, *(f"  {row}" for row in self.rows), *sentences]), machines=self.machines)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The properties that a host has reported."""

    values: dict[str, tuple[str, ...]]  # the values of each key that scripts.facts_script prints
    failure: str = ""  # why the script failed; empty if it did not
    clock_s: float | None = None  # how far its clock is ahead of this machine's; None if unknown

    def get(self, word: str) -> str:
        """Return the first value of a key, or an empty string."""
        return self.values.get(word, ("",))[0]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs."""
        return self.values.get("gpu", ())

    @property
    def free_gpus(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs that no process uses and that no run has claimed."""
        taken = {*self.values.get("busy", ()), *(gpu for claim in self.claims for gpu in claim.gpus)}
        return tuple(gpu for gpu in self.gpus if gpu not in taken)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of the runs on this host."""
        return parse_claims(self.values.get("claim", ()))

    @property
    def tickets(self) -> tuple[tuple[str, str], ...]:
        """The run and the uid of each launch in this host's queue, in order. Lines that are no tickets are skipped."""
        rows = sorted(fields for line in self.values.get("ticket", ()) if len(fields := line.split()) == 3)
        return tuple((run, uid) for number, run, uid in rows if number.isdecimal())

    def ahead(self, uid: str) -> tuple[str, ...]:
        """Return the launches ahead of the launch ``uid`` in the queue, or all launches if it is not in the queue."""
        return tuple(run for run, _ in takewhile(lambda ticket: ticket[1] != uid, self.tickets))

    def number(self, word: str) -> int:
        """Return the first value of a key as an integer, or 0 if it is unknown."""
        return int(self.get(word)) if self.get(word).isdecimal() else 0

    def step(self, word: str) -> int:
        """Return the step of a checkpoint's manifest, or 0 if it is unknown."""
        with suppress(ValueError, TypeError, KeyError):
            return int(json.loads(self.get(word))["step"])
        return 0

    @property
    def image(self) -> Image | None:
        """The job's image as the host's engine describes it, or None if the host does not have it."""
        try:
            return read_inspect(self.get("asked"), self.get("image")) if self.get("image") else None
        except ValueError:
            return None

    @property
    def image_id(self) -> str:
        """The image's ID (``sha256:…``), or an empty string if the host does not have the image."""
        return self.image.id if self.image else ""

    @property
    def address(self) -> str:
        """The address at which this machine reached the host, or an empty string if it is unknown."""
        return "".join(self.get("ssh").split()[2:3])


def parse_facts(output: Output) -> Facts:
    """Parse the output of ``scripts.facts_script``. If the end of the output is missing, ``failure`` is set."""
    values: dict[str, tuple[str, ...]] = {}
    for line in output.stdout.splitlines():
        word, _, value = line.partition(" ")
        values[word] = (*values.get(word, ()), value.strip())
    return Facts(values=values, failure="" if "end" in values else one_line(output.last_line(NO_ERROR)))


def clock_of(date: Output) -> float | None:
    """Return how far a host's clock is ahead of this machine's, from the output of ``date``. None if it is unknown."""
    with suppress(ValueError):
        return float(date.stdout) - date.at
    return None


def judge(
    options: SshOptions,
    plan: Plan,
    hosts: Sequence[SshHost],
    facts: Sequence[Facts],
    gpus_of: Callable[[int], int] | None = None,
) -> Judgement:
    """Find the problems of each host. The launch's own tickets are not a problem.

    ``gpus_of`` returns the number of GPUs that the host at a position needs. None: host N is for node N.
    """
    job = plan.job
    needs = map(gpus_of or job.gpus_of, range(len(hosts)))
    cuda = job.device == "cuda" or (job.device == "auto" and any(fact.gpus or fact.get("gpu_error") for fact in facts))
    wrong = [
        [*_alone(options, plan, host, fact, need if cuda else 0)]
        for host, fact, need in zip(hosts, facts, needs, strict=True)
    ]
    for number, text in _images(job.image, hosts, facts) if options.runtime != "none" else ():
        wrong[number].append((ConfigError, "image", text))
    names: dict[str, str] = {}  # machine → its first address
    for address, fact, problems in zip((host.address for host in hosts), facts, wrong, strict=True):
        machine = fact.get("machine")
        if machine and (name := names.setdefault(machine, address)) != address:
            text = f"{address} and {name} are the same machine: remove one of the two from hosts"
            problems.append((ConfigError, "machine", text))
    rows = table(list(_rows(options, hosts, facts, wrong)))
    return Judgement(
        hosts=tuple(hosts), facts=tuple(facts), cuda=cuda, wrong=tuple(map(tuple, wrong)), rows=tuple(rows)
    )


def _alone(options: SshOptions, plan: Plan, host: SshHost, fact: Facts, gpus: int) -> Iterator[Problem]:
    if fact.failure:
        yield UnavailableError, "SSH", fact.failure
        return
    if fact.get("engine_error"):
        if options.environment:
            yield UnavailableError, "environment", "its environment was not made: see the lines above"
            return
        engine = f"{options.python} there" if options.runtime == "none" else options.runtime
        yield UnavailableError, "container runtime", f"{engine}: {fact.get('engine_error')}"
    if not fact.get("flock"):
        yield UnavailableError, "flock", "flock is missing there: install util-linux"
    if not fact.get("writable"):
        text = f"{options.home} is not writable there: set the target's 'home' to a writable folder"
        yield UnavailableError, "disk", text
    need, free = size_bytes(options.min_disk), int(fact.get("disk") or 0) * 1024
    if free < need:
        text = f"{need / GIB:g} GiB needed (min_disk), but {format_free(free)} free in {options.home}"
        yield UnavailableError, "disk", f"its disk is full: {text}"
    yield from _gpus(options, plan, host, fact, gpus)
    script = script_of(plan.job.command)
    looked = options.runtime == "none" or options.project.startswith(("/", "~"))
    if script and looked and options.project != "sync" and not fact.get("script"):
        folder = "home folder" if options.project == "none" else f"folder {options.project}"
        to_do = "give the script's path on that host, or set 'project: sync' to send the folder from which you launch"
        yield NoInputError, "script", f"its {folder} has no script '{script}': {to_do}"


def _gpus(options: SshOptions, plan: Plan, host: SshHost, fact: Facts, need: int) -> Iterator[Problem]:
    if not need:
        return
    if failure := fact.get("gpu_error"):
        text = f"nvidia-smi failed there ({failure}): repair the driver, or use --device cpu"
        yield UnavailableError, "GPUs", text
        return
    allowed = len(fact.gpus) if host.gpus is None else min(host.gpus, len(fact.gpus))
    if allowed < need:
        limit = "" if host.gpus is None else f", of which a run may have {host.gpus}"
        has = f"{counted(len(fact.gpus), 'GPU')}{limit}"
        fewer = "use fewer, give each node its own number (--gpus N,N,...), or" if allowed else "use"
        yield ConfigError, "GPUs", f"it has {has}, not {need}: {fewer} --device cpu for CPU ranks"
    elif fact.get("claims_error"):
        yield UnavailableError, "GPUs", f"its free GPUs are unknown: {fact.get('claims_error')}"
    elif len(fact.free_gpus) < need:
        yield GpusTakenError, "GPUs", _taken(need, fact)
    elif ahead := fact.ahead(plan.uid):
        who = f"{'run' if len(ahead) == 1 else 'runs'} {', '.join(map(repr, ahead))}"
        waits = "is already waiting" if len(ahead) == 1 else "are already waiting"
        yield GpusTakenError, "GPUs", f"{who} {waits} for GPUs there: use --wait, such as --wait 2h, to join the queue"
    if options.runtime == "docker" and "nvidia" not in fact.get("runtimes"):
        yield UnavailableError, "container runtime", "docker has no NVIDIA runtime: install nvidia-container-toolkit"


def _taken(need: int, fact: Facts) -> str:
    verb = "is" if len(fact.free_gpus) == 1 else "are"
    now = fact.number("now")
    who = [
        f"run '{claim.run}' has been using {counted(len(claim.gpus), 'GPU')} for {format_duration(now - claim.since)}"
        for claim in fact.claims
        if claim.gpus
    ]
    if len(fact.gpus) - len(fact.free_gpus) > sum(len(claim.gpus) for claim in fact.claims):
        who.append("other programs use the rest: see nvidia-smi")
    return (
        f"{counted(need, 'GPU')} needed, but {len(fact.free_gpus)} of {len(fact.gpus)} {verb} free "
        f"({', '.join(who)}): use --wait, such as --wait 2h, to wait for free GPUs"
    )


def _images(image: str, hosts: Sequence[SshHost], facts: Sequence[Facts]) -> Iterator[tuple[int, str]]:
    """Yield the position and an error for each host whose image is missing or differs from the first host's image."""
    first: tuple[str, Image] | None = None
    for number, (host, fact) in enumerate(zip(hosts, facts, strict=True)):
        if fact.failure or not fact.get("engine"):
            continue
        if (its_image := fact.image) is None:
            yield number, f"it does not have the image {image}: send it with ddpctl image ship, or pull it there"
        elif first is None:
            first = (host.address, its_image)
        elif problem := difference(first[1], its_image):
            yield number, f"{problem}, as on {first[0]}: send the same image to all hosts with ddpctl image ship"


def _rows(
    options: SshOptions, hosts: Sequence[SshHost], facts: Sequence[Facts], wrong: Sequence[Sequence[Problem]]
) -> Iterator[tuple[str, ...]]:
    yield ("HOST", "SSH", options.runtime.upper() if options.runtime != "none" else "PYTHON", "IMAGE", "GPUS FREE",
           "DISK FREE", "CLOCK", "STATE")  # fmt: skip
    for host, fact, problems in zip(hosts, facts, wrong, strict=True):
        cells: tuple[str, ...] = ("no", "-", "-", "-", "-", "-")
        if not fact.failure:
            cells = (
                "yes",
                fact.get("engine").removeprefix("Python ") or "no",
                "-" if options.runtime == "none" else fact.image_id.removeprefix("sha256:")[:12] or "no",
                f"{len(fact.free_gpus)} of {len(fact.gpus)}",
                f"{int(fact.get('disk') or 0) * 1024 / GIB:.0f} GiB",
                "-" if fact.clock_s is None else f"{fact.clock_s:+.1f} s",
            )
        yield (host.address, *cells, "not ready" if problems else "ready")


def host_report(host: SshHost, output: Output) -> HostReport:
    """Parse the output of ``scripts.gpus_text``."""
    fact = parse_facts(output)
    if failure := fact.failure or fact.get("gpu_error") or fact.get("claims_error"):
        return HostReport(host=host.address, failure=failure)
    holders: dict[str, Any] = {
        gpu: {"run": claim.run, "node": claim.node, "since": claim.since} for claim in fact.claims for gpu in claim.gpus
    }
    use = {uuid: numbers for uuid, *numbers in (line.replace(",", " ").split() for line in fact.values.get("use", ()))}

    def gpu_report(uuid: str) -> GpuReport:
        fields = zip(("busy_percent", "memory_mib", "total_mib"), use.get(uuid, ()), strict=False)
        numbers: dict[str, Any] = {name: int(text) for name, text in fields if text.isdecimal()}
        computes = uuid in fact.values.get("busy", ())
        return GpuReport(uuid=uuid, computes=computes, **holders.get(uuid, {}), **numbers)

    load = fact.get("load").split()
    return HostReport(
        host=host.address,
        time=fact.number("now"),
        load=float(load[0]) if len(load) == 2 else None,
        cores=int(load[1]) if len(load) == 2 else None,
        gpus=tuple(map(gpu_report, fact.gpus)),
        cpu_runs=tuple(
            CpuRun(run=claim.run, node=claim.node, since=claim.since) for claim in fact.claims if not claim.gpus
        ),
        waiting=tuple(run for run, _ in fact.tickets),
    )


def split_shown(output: Output, count: int) -> list[Output]:
    """Split the output of ``scripts.show`` into one output per node.

    If the script ended early, the outputs of the remaining nodes have its exit code and its stderr.
    """
    *done, last = output.stdout.split(f"{SHOWN}\n")
    outputs = [*(Output(returncode=Exit.OK, stdout=text) for text in done), replace(output, stdout=last)]
    return outputs + [replace(output, stdout="")] * (count - len(outputs))


def report(output: Output) -> Any:
    """Parse the output of ``scripts.show`` for one node. Return None if the script failed."""
    try:
        return json.loads(output.stdout) if output.returncode == Exit.OK else None
    except ValueError:
        return None
