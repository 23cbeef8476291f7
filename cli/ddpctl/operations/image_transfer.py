"""Copies a container image to hosts without a registry (``ddpctl image ship``): survey, pack, send, check, load.

The output of `docker save` is split into blobs: one for each compressed layer and one for the image's configuration.
Each host stores the blobs under the SHA-256 of their content, so that no blob is sent twice. Then each host loads the
image from its blobs. A host needs sh, tar, sha256sum, and zstd or gzip. If one host fails, the transfers to the other
hosts continue.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, Literal

from ddpctl.command import Command, FilePart, Host, Transfer, Verb
from ddpctl.errors import DdpctlError, UnavailableError, writing
from ddpctl.files.images import Engine, Image, difference, human_size, inspect_line, read_inspect
from ddpctl.operations.launcher import AppContext
from ddpctl.operations.removal import together
from ddpctl.text import counted
from ddpwire.exits import Exit

Codec = Literal["zst", "gz"]
CACHE = "$HOME/.cache/ddpctl/images"  # on a host
PACK_S = 3600.0
LONG_S = 1800.0
KEPT_DAYS = 30
_COMPRESS: Mapping[Codec, str] = {"zst": "zstd -q -T0 -3", "gz": "gzip -1"}
_SURVEY = f"""\
mkdir -p "{CACHE}" && cd "{CACHE}" || exit 73
"$1" version >/dev/null || exit 69
if command -v zstd >/dev/null; then echo zstd; fi
for file in *; do if [ -f "$file" ]; then echo "$(wc -c <"$file") $file"; fi; done
"""
_PACK = """\
set -eu
if [ ! -f "$3" ]; then
  tar -xOf "$1" "$2" | if [ "$4" = plain ]; then cat; else gzip -dcf | $4; fi >"$1.part"
  mv "$1.part" "$3"
fi
touch "$3"
wc -c <"$3"
"""
_FILE = re.compile(r"^ *([0-9]+) ([0-9a-f]{64}\.[a-z.]+)$", re.MULTILINE)  # a login may print other lines too
# An incomplete part stays, so that the next transfer continues it. A corrupt one is removed.
_RECEIVE = f"""\
cd "{CACHE}" || exit 73
if [ "$2" = 0 ]; then cat >"$1.part"; else cat >>"$1.part"; fi || exit 73
if [ "$(wc -c <"$1.part")" -lt "$3" ]; then echo "the transfer was interrupted" >&2; exit 69; fi
case $1 in *.zst) zstd -dcq "$1.part" ;; *.gz) gzip -dc "$1.part" ;; *) cat "$1.part" ;; esac | sha256sum >"$1.sum"
read -r sum _ <"$1.sum"; rm -f "$1.sum"
if [ "$sum" = "$4" ]; then mv "$1.part" "$1"; else rm -f "$1.part"; exit 65; fi
"""
_LOAD = f"""\
set -eu
engine=$1 manifest=$2 config=$3; shift 3
cd "{CACHE}"
work=$(mktemp -d load.XXXXXX)
trap 'rm -rf "$work"' EXIT
printf %s "$manifest" >"$work/manifest.json"
cp "$config" "$work/"
for blob; do
  case $blob in *.zst) zstd -dcq "$blob" ;; *) gzip -dc "$blob" ;; esac >"$work/${{blob%.*}}"
  touch "$blob"
done
tar -C "$work" -cf - . | "$engine" load >&2
find . -maxdepth 1 -type f -mtime +{KEPT_DAYS} -exec rm -f {{}} +
"""
SILENT = "it failed without a message"


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A layer or the configuration of an image, as a file."""

    digest: str  # SHA-256 of the uncompressed content, in hexadecimal
    name: str  # on this machine and on the host: DIGEST.tar.zst, DIGEST.tar.gz or DIGEST.json
    path: str = ""  # on this machine, once it is packed
    size: int = 0  # compressed


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a host has before anything is sent."""

    host: Host
    problem: str = ""  # why nothing can be sent to the host; empty if it can
    image: Image | None = None  # the image that the host has under the reference
    has_zstd: bool = False
    files: Mapping[str, int] = field(default_factory=dict)  # the files in its cache: name → bytes

    def blob_of(self, digest: str) -> str | None:
        """Return the name of the layer's file on the host, or None if the host does not have the layer."""
        return next((name for codec in _COMPRESS if (name := f"{digest}.tar.{codec}") in self.files), None)


def inspect_image(engine: Engine, reference: str) -> Verb[Image]:
    """Return the image on this machine. Raises UnavailableError."""
    (done,) = yield (Command(argv=inspect_line(engine, reference), probe=True),)
    if done.returncode:
        reason = done.last_line(SILENT)
        if not re.search("no such (image|object)|image not known", reason, re.IGNORECASE):
            raise UnavailableError(f"cannot inspect image {reference} with {engine} on this machine: {reason}")
        raise UnavailableError(f"{reference}: {reason}: run ddpctl image build or {engine} pull")
    return read_inspect(reference, done.stdout)


def survey_hosts(engine: Engine, reference: str, hosts: tuple[Host, ...]) -> Verb[tuple[Survey, ...]]:
    """Return what each host already has, after asking all hosts in parallel."""
    outputs = yield tuple(
        command
        for host in hosts
        for command in (
            Command(argv=("sh", "-c", _SURVEY, "sh", engine), host=host, probe=True),
            Command(argv=inspect_line(engine, reference), host=host, probe=True),
        )
    )
    surveys = []
    for host, answer, held in zip(hosts, outputs[::2], outputs[1::2], strict=True):
        if answer.returncode:
            surveys.append(Survey(host=host, problem=answer.last_line(SILENT)))
            continue
        image = None if held.returncode else read_inspect(reference, held.stdout)
        files = {name: int(size) for size, name in _FILE.findall(answer.stdout)}
        has_zstd = "zstd" in answer.stdout.splitlines()
        surveys.append(Survey(host=host, image=image, has_zstd=has_zstd, files=files))
    return tuple(surveys)


def choose_codec(surveys: Sequence[Survey]) -> Verb[Codec]:
    """Return zstd if this machine and all hosts have it, and otherwise gzip."""
    (here,) = yield (Command(argv=("zstd", "--version"), probe=True),)
    return "zst" if here.returncode == 0 and all(survey.has_zstd for survey in surveys) else "gz"


def pack(
    engine: Engine, image: Image, missing: frozenset[str], codec: Codec, folder: str, scratch: str
) -> Verb[tuple[Blob, tuple[Blob, ...]]]:
    """Write the configuration and the compressed ``missing`` layers to ``folder``, and return them as blobs.

    ``scratch`` is a temporary folder for the uncompressed image. Raises UnavailableError, DdpctlError.
    """
    tar = str(PurePath(scratch) / "image.tar")
    form = ("--format", "docker-archive") if engine == "podman" else ()
    (saved,) = yield (Command(argv=(engine, "save", *form, "--output", tar, image.reference), timeout_s=PACK_S),)
    saved.check(f"{engine} save {image.reference}")
    (listed,) = yield (Command(argv=("tar", "-xOf", tar, "manifest.json"), timeout_s=LONG_S),)
    config, members = read_manifest(listed.stdout)
    if len(members) != len(image.layers):
        raise DdpctlError(f"{engine} save {image.reference} wrote {len(members)} layers of {len(image.layers)}")
    # Several layers can be equal. Docker writes the first, and a link for each other one.
    wanted = dict(reversed([*zip((layer.removeprefix("sha256:") for layer in image.layers), members, strict=True)]))
    blobs = [Blob(digest=PurePath(config).stem, name=f"{PurePath(config).stem}.json")]
    blobs += [Blob(digest=digest, name=f"{digest}.tar.{codec}") for digest in wanted if digest in missing]
    packed = []
    for blob in blobs:
        path = str(PurePath(folder) / blob.name)
        how = ("plain", config) if blob.name.endswith(".json") else (_COMPRESS[codec], wanted[blob.digest])
        argv = ("sh", "-c", _PACK, "sh", tar, how[1], path, how[0])
        (done,) = yield (Command(argv=argv, timeout_s=PACK_S),)
        done.check(f"cannot pack a layer of {image.reference}")
        packed.append(Blob(digest=blob.digest, name=blob.name, path=path, size=int(done.stdout)))
    old = ("find", folder, "-maxdepth", "1", "-type", "f", "-mtime", f"+{KEPT_DAYS}", "-delete")
    yield (Command(argv=old),)
    return packed[0], tuple(packed[1:])


def read_manifest(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the names of the configuration and of the layers in the archive. Raises DdpctlError."""
    try:
        (manifest,) = json.loads(text)
        return manifest["Config"], tuple(manifest["Layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise DdpctlError(f"the saved image has no readable manifest: {error}") from None


def send(survey: Survey, blob: Blob, say: str = "") -> Verb[int]:
    """Send what a host lacks of a blob, and verify it there. Return the number of bytes. Raises UnavailableError."""
    if blob.name in survey.files:
        return 0
    received = survey.files.get(f"{blob.name}.part", 0)
    start = received if received <= blob.size else 0
    part = FilePart(path=blob.path, start=start, length=blob.size - start)
    argv = ("sh", "-c", _RECEIVE, "sh", blob.name, str(start), str(blob.size), blob.digest)
    moved = Transfer(num_bytes=part.length, num_files=1, reads=part)
    (done,) = yield (Command(argv=argv, host=survey.host, transfer=moved, timeout_s=LONG_S, say=say),)
    if done.returncode == Exit.DATA:
        raise UnavailableError(f"layer {blob.name[:12]} arrived corrupted and was removed there: ship the image again")
    if done.returncode:
        raise UnavailableError(f"{done.last_line(SILENT)}: ship the image again to resume the transfer")
    return part.length


def load(engine: Engine, host: Host, image: Image, config: Blob, names: tuple[str, ...]) -> Verb[Image]:
    """Load the image on a host from its blobs, and return the image that the host then has. Raises UnavailableError."""
    layers = [f"{layer.removeprefix('sha256:')}.tar" for layer in image.layers]
    manifest = [{"Config": config.name, "RepoTags": [image.reference], "Layers": layers}]
    argv = ("sh", "-c", _LOAD, "sh", engine, json.dumps(manifest), config.name, *dict.fromkeys(names))
    (done,) = yield (Command(argv=argv, host=host, timeout_s=LONG_S),)
    done.check(f"{engine} load")
    (held,) = yield (Command(argv=inspect_line(engine, image.reference), host=host),)
    held.check(f"{engine} load did not create {image.reference}")
    return read_inspect(image.reference, held.stdout)


# The complete transfer


def copy_to_hosts(
    context: AppContext, engine: Engine, reference: str, hosts: tuple[Host, ...], folder: Path
) -> list[dict[str, Any]]:
    """Copy an image to all hosts. Only layers that a host does not have are sent. Raises UnavailableError.

    Return each ``host``, the number of bytes ``sent`` to it (without the overhead of SSH), and its ``error`` or "".
    ``folder`` keeps the packed blobs; the next call uses them again.
    """
    perform, emit = context.executor.perform, context.emit
    image = perform(inspect_image(engine, reference))
    emit(f"{reference}: {human_size(image.size)} in {counted(len(image.layers), 'layer')}")
    surveys = perform(survey_hosts(engine, reference, hosts))
    lacking = [
        survey for survey in surveys if not survey.problem and (not survey.image or difference(image, survey.image))
    ]
    results: dict[Host, int | DdpctlError] = {}
    if lacking:
        config, layers = _pack(context, engine, image, lacking, folder)
        verbs = [_deliver(engine, image, survey, config, layers) for survey in lacking]
        results = dict(zip((survey.host for survey in lacking), perform(together(verbs)), strict=True))
    deliveries = []
    for survey in surveys:
        result = results.get(survey.host, 0)
        error = survey.problem or (str(result) if isinstance(result, DdpctlError) else "")
        sent = 0 if isinstance(result, DdpctlError) else result
        loaded = f"loaded, {human_size(sent)} sent" if survey.host in results else "has it already"
        emit(f"{survey.host}: {error or loaded}")
        deliveries.append({"host": str(survey.host), "sent": sent, "error": error})
    return deliveries


def _pack(
    context: AppContext, engine: Engine, image: Image, surveys: Sequence[Survey], folder: Path
) -> tuple[Blob, tuple[Blob, ...]]:
    digests = [layer.removeprefix("sha256:") for layer in image.layers]
    missing = frozenset(digest for digest in digests for survey in surveys if not survey.blob_of(digest))
    codec = context.executor.perform(choose_codec(surveys))
    if codec == "gz":
        context.emit("compressing with gzip, because zstd (faster and smaller) is not on all machines")
    context.emit(f"packing {counted(len(missing), 'layer')} that not every host has")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=folder, prefix="ship-")
    with scratch as path:
        return context.executor.perform(pack(engine, image, missing, codec, str(folder), path))


def _deliver(engine: Engine, image: Image, survey: Survey, config: Blob, layers: Sequence[Blob]) -> Verb[int]:
    """Send a host what it lacks, and load the image there. Return the number of bytes sent. Raises UnavailableError."""
    blobs, digests = (
        {layer.digest: layer for layer in layers},
        [layer.removeprefix("sha256:") for layer in image.layers],
    )
    lacking = [blobs[digest] for digest in dict.fromkeys(digests) if not survey.blob_of(digest)]
    number, total = len(set(digests)), human_size(sum(blob.size for blob in lacking))
    say = f"{survey.host}: has {number - len(lacking)} of {number} layers, {total} to send"
    sent = 0
    for blob in (config, *lacking):
        sent += yield from send(survey, blob, say)
    names = tuple(survey.blob_of(digest) or blobs[digest].name for digest in digests)
    held = yield from load(engine, survey.host, image, config, names)
    if wrong := difference(image, held):
        raise UnavailableError(wrong)
    return sent
