"""What was found out about every host, and whether a run may start: checked for all hosts at once. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.images import Image, difference, read_inspect
from ddpctl.launch_plan import counted
from ddpctl.spec import JobSpec, size_bytes
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.text import one_line, table
from ddpwire.exits import Exit

CLOCK_S = 5.0  # a larger offset is told; what it breaks is the order of log lines, not the training
GIB = 1 << 30
Found = tuple[bool, tuple[str, ...], tuple[str, ...]]  # whether the ranks take GPUs, the table, warnings
Wrong = tuple[int, type[DdpctlError], str]  # which host, what kind of error, the sentence


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one host said of itself."""

    words: dict[str, tuple[str, ...]]  # each word's values, as scripts.facts_script prints them
    failure: str = ""  # why it said nothing
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
        """Those on which nothing computes."""
        return tuple(gpu for gpu in self.gpus if gpu not in self.words.get("busy", ()))

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
    return Facts(words=words, failure=one_line(output.last_line("it said nothing")))


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


def check(
    options: SshOptions,
    job: JobSpec,
    hosts: Sequence[SshHost],
    facts: Sequence[Facts],
    script: str | None,
    *,
    dry_run: bool = False,
) -> Found:
    """Whether the ranks take GPUs, the table of the hosts, and warnings. Raises DdpctlError when not all are ready.

    Its message says that nothing was started, unless nothing was meant to be: ``dry_run``.
    """
    cuda = job.device == "cuda" or (job.device == "auto" and any(fact.gpus or fact.get("gpu_error") for fact in facts))
    wrong: list[Wrong] = []
    for number, (host, fact) in enumerate(zip(hosts, facts, strict=True)):
        found = (
            _alone(options, job, host, fact, script, cuda) if not fact.failure else [(UnavailableError, fact.failure)]
        )
        wrong += [(number, kind, text) for kind, text in found]
    if options.runtime != "none":
        wrong += [(number, ConfigError, text) for number, text in _images(job.image, hosts, facts)]
    rows = table(list(_rows(options, hosts, facts, {number for number, _, _ in wrong})))
    if wrong:
        raise _refusal("" if dry_run else "nothing was started: ", hosts, sorted(wrong, key=lambda one: one[0]), rows)
    warnings = [
        f"{host.address}: its clock is {fact.clock_s:+.0f} s off this machine's"
        for host, fact in zip(hosts, facts, strict=True)
        if fact.clock_s is not None and abs(fact.clock_s) > CLOCK_S
    ]
    return cuda, tuple(rows), tuple(warnings)


def _refusal(before: str, hosts: Sequence[SshHost], wrong: Sequence[Wrong], rows: Iterable[str]) -> DdpctlError:
    bad = {number for number, _, _ in wrong}
    kind = ConfigError if all(kind is ConfigError for _, kind, _ in wrong) else UnavailableError
    head = f"{before}{len(bad)} of {len(hosts)} hosts {'is' if len(bad) == 1 else 'are'} not ready"
    sentences = [one_line(f"{hosts[number].address}: {text}") for number, _, text in wrong]
    return kind("\n".join([head, *(f"  {row}" for row in rows), *sentences]))


def _alone(
    options: SshOptions, job: JobSpec, host: SshHost, fact: Facts, script: str | None, cuda: bool
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
    for run in sorted(set(fact.words.get("lock", ()))):
        yield UnavailableError, f"the run {run} is there, and a host has one run: wait for it, or ddpctl stop {run}"
    yield from _gpus(options, job, host, fact, cuda)
    looked = options.runtime == "none" or options.project.startswith(("/", "~"))
    if script and looked and options.project != "sync" and not fact.get("script"):
        folder = "the home folder" if options.project == "none" else options.project
        yield (
            ConfigError,
            f"{script}: no such script in {folder} there: give its path, or let 'project: sync' send this folder",
        )


def _gpus(
    options: SshOptions, job: JobSpec, host: SshHost, fact: Facts, cuda: bool
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
    elif len(fact.free_gpus) < job.gpus:
        verb = "is" if len(fact.free_gpus) == 1 else "are"
        yield (
            UnavailableError,
            f"{len(fact.free_gpus)} of its {counted(len(fact.gpus), 'GPU')} {verb} free, {job.gpus} needed: "
            "others compute on the rest (nvidia-smi)",
        )
    if options.runtime == "docker" and "nvidia" not in fact.get("runtimes"):
        yield UnavailableError, "docker has no NVIDIA runtime there: install nvidia-container-toolkit"


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


def report(output: Output) -> Any:
    """What scripts.show printed, or None where the host could not say it."""
    try:
        return json.loads(output.stdout) if output.returncode == Exit.OK else None
    except ValueError:
        return None
