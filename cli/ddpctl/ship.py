"""The order in which an image goes to other machines: ask, pack, send, check, load; all hosts side by side.

Composes the verbs of ``archive`` and prints what happens, a line a host and step. A host that fails stops no other.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpctl import archive
from ddpctl.archive import Blob, Survey
from ddpctl.command import Host
from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError
from ddpctl.images import Engine, Image, difference, human_size
from ddpctl.plan import counted
from ddpctl.runner import Runner

MAX_PARALLEL = 16


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What one host got."""

    host: str
    sent: int  # bytes over the wire, before SSH's own
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Shipper:
    """Ships one image from this machine."""

    runner: Runner
    say: Callable[[str], None]
    engine: Engine
    folder: Path  # where blobs are packed; kept, so that a second ship need not pack again

    def ship(self, reference: str, hosts: tuple[Host, ...]) -> tuple[Delivery, ...]:
        """Bring an image to all hosts, each layer that is missing there once. Raises UnavailableError."""
        image = self.runner.perform(archive.look_at(self.engine, reference))
        self.say(f"{reference}: {human_size(image.size)} in {counted(len(image.layers), 'layer')}")
        surveys = self.runner.perform(archive.survey(self.engine, reference, hosts))
        ready, done = [], []
        for survey in surveys:
            if survey.problem:
                done.append(Delivery(host=str(survey.host), sent=0, error=survey.problem))
            elif survey.image and not difference(image, survey.image):
                self.say(f"{survey.host}: has it already")
                done.append(Delivery(host=str(survey.host), sent=0))
            else:
                ready.append(survey)
        if ready:
            config, layers = self._pack(image, tuple(ready))
            with ThreadPoolExecutor(min(len(ready), MAX_PARALLEL)) as pool:
                try:
                    done += pool.map(lambda survey: self._guarded(image, survey, config, layers), ready)
                except BaseException:
                    self.runner.close()  # Ctrl-C: what is being sent ends, and a next ship goes on there
                    raise
        for one in done:
            if one.error:
                self.say(f"{one.host}: {one.error}")
        order = [str(host) for host in hosts]
        return tuple(sorted(done, key=lambda one: order.index(one.host)))

    def _pack(self, image: Image, surveys: tuple[Survey, ...]) -> tuple[Blob, tuple[Blob, ...]]:
        digests = [archive.digest_hex(layer) for layer in image.layers]
        missing = frozenset(digest for digest in digests for survey in surveys if not survey.blob_of(digest))
        codec = self.runner.perform(archive.choose_codec(surveys))
        if codec == "gz":
            self.say("gzip compresses: zstd, which is quicker and smaller, is not on all machines")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = TemporaryDirectory(dir=self.folder, prefix="ship-")
        except OSError as error:
            raise CannotWriteError(f"cannot write {self.folder}: {error.strerror}") from None
        started = time.monotonic()
        self.say(f"packing {counted(len(missing), 'layer')} that not every host has")
        with scratch as path:
            verb = archive.pack(self.engine, image, missing, codec, str(self.folder), path)
            config, layers = self.runner.perform(verb)
        size = human_size(sum(layer.size for layer in layers))
        self.say(f"packed {size} in {time.monotonic() - started:.0f} s")
        return config, layers

    def _guarded(self, image: Image, survey: Survey, config: Blob, layers: tuple[Blob, ...]) -> Delivery:
        try:
            return self._deliver(image, survey, config, layers)
        except DdpctlError as error:
            words = str(error).removeprefix(f"{survey.host}: ")
            return Delivery(host=str(survey.host), sent=0, error=words)

    def _deliver(self, image: Image, survey: Survey, config: Blob, layers: tuple[Blob, ...]) -> Delivery:
        """Send what this host lacks, and load."""
        host, started = survey.host, time.monotonic()
        by_digest = {layer.digest: layer for layer in layers}
        digests = [archive.digest_hex(layer) for layer in image.layers]
        lacking = [by_digest[digest] for digest in dict.fromkeys(digests) if not survey.blob_of(digest)]
        total = sum(blob.size for blob in lacking)
        self.say(
            f"{host}: has {len(set(digests)) - len(lacking)} of {len(set(digests))} layers, {human_size(total)} to send"
        )
        sent = 0
        for blob in (config, *lacking):
            sent += self._send(survey, blob, f"{host}: sent", total - sent)
        names = tuple(survey.blob_of(digest) or by_digest[digest].name for digest in digests)
        held = self.runner.perform(archive.load(self.engine, host, image, config, names))
        if wrong := difference(image, held):
            raise UnavailableError(f"{host}: {wrong}")
        self.say(f"{host}: loaded, {human_size(sent)} sent, {time.monotonic() - started:.0f} s")
        return Delivery(host=str(host), sent=sent)

    def _send(self, survey: Survey, blob: Blob, prefix: str, left: int) -> int:
        """Send one blob, from where a former ship was cut off; the bytes that were sent."""
        if blob.name in survey.files:
            return 0
        there = survey.files.get(f"{blob.name}.part", 0)
        position = there = there if there <= blob.size else 0
        while position < blob.size:
            position = self.runner.perform(archive.send(survey.host, blob, position))
            if blob.size > archive.PART_BYTES:
                self.say(
                    f"{prefix} {human_size(position)} of {human_size(blob.size)} of a layer, {human_size(left)} in all"
                )
        self.runner.perform(archive.check(survey.host, blob))
        return blob.size - there
