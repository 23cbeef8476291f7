"""An image as blobs: what `docker save` wrote, taken apart here and put together again on a host. Pure verbs.

A blob is a layer, compressed, or the image's configuration; its name is the SHA-256 of its content, so a host keeps
what it has, and what it has is never sent again. The host needs sh, tar, sha256sum, and zstd or gzip.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ddpctl.command import Command, FilePart, Host, Verb
from ddpctl.errors import DdpctlError, UnavailableError
from ddpctl.images import Engine, Image, inspect_line, read_inspect

Codec = Literal["zst", "gz"]
CACHE = "$HOME/.cache/ddpctl/images"  # on a host
PART_BYTES = 64 << 20  # sent at a time: how often progress is told
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
_FILE = re.compile(r"^ *([0-9]+) ([0-9a-f]{64}\.[a-z.]+)$", re.MULTILINE)  # a log-in may say something else as well
_RECEIVE = f"""\
cd "{CACHE}" || exit 73
if [ "$2" = 0 ]; then cat >"$1.part"; else cat >>"$1.part"; fi
"""
_CHECK = f"""\
cd "{CACHE}" || exit 73
case $1 in *.zst) zstd -dcq "$1.part" ;; *.gz) gzip -dc "$1.part" ;; *) cat "$1.part" ;; esac | sha256sum >"$1.sum"
read -r sum _ <"$1.sum"; rm -f "$1.sum"
if [ "$sum" = "$2" ]; then mv "$1.part" "$1"; else rm -f "$1.part"; exit 65; fi
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


@dataclass(frozen=True, kw_only=True)
class Blob:
    """One file of an image on its way."""

    digest: str  # SHA-256 of the uncompressed content, in hexadecimal
    name: str  # on both sides: DIGEST.tar.zst, DIGEST.tar.gz or DIGEST.json
    path: str = ""  # here, once it is packed
    size: int = 0  # compressed


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a host has, before anything is sent."""

    host: Host
    problem: str = ""  # why nothing can be sent to it; empty: it can
    image: Image | None = None  # what it holds under the reference
    has_zstd: bool = False
    files: Mapping[str, int] = field(default_factory=dict)  # name → bytes, in its cache

    def blob_of(self, digest: str) -> str | None:
        """The layer as it has it, however it is compressed."""
        return next((name for codec in _COMPRESS if (name := f"{digest}.tar.{codec}") in self.files), None)


def look_at(engine: Engine, reference: str) -> Verb[Image]:
    """The image as it is on this machine. Raises UnavailableError."""
    (done,) = yield (Command(argv=inspect_line(engine, reference), probe=True),)
    if done.returncode:
        said = _last(done.stderr)
        if not re.search("no such (image|object)|image not known", said, re.IGNORECASE):
            raise UnavailableError(f"{engine} here cannot be asked for {reference}: {said}")
        raise UnavailableError(f"{reference}: {said}: ddpctl image build makes one, {engine} pull gets one")
    return read_inspect(reference, done.stdout)


def survey(engine: Engine, reference: str, hosts: tuple[Host, ...]) -> Verb[tuple[Survey, ...]]:
    """Ask all hosts at once."""
    outputs = yield tuple(
        command
        for host in hosts
        for command in (
            Command(argv=("sh", "-c", _SURVEY, "sh", engine), host=host, probe=True),
            Command(argv=inspect_line(engine, reference), host=host, probe=True),
        )
    )
    surveys = []
    for host, asked, held in zip(hosts, outputs[::2], outputs[1::2], strict=True):
        if asked.returncode:
            surveys.append(Survey(host=host, problem=_last(asked.stderr)))
            continue
        image = None if held.returncode else read_inspect(reference, held.stdout)
        files = {name: int(size) for size, name in _FILE.findall(asked.stdout)}
        has_zstd = "zstd" in asked.stdout.splitlines()
        surveys.append(Survey(host=host, image=image, has_zstd=has_zstd, files=files))
    return tuple(surveys)


def choose_codec(surveys: tuple[Survey, ...]) -> Verb[Codec]:
    """Which compression all of them have: zstd where this machine has it too, else gzip."""
    (here,) = yield (Command(argv=("zstd", "--version"), probe=True),)
    return "zst" if here.returncode == 0 and all(one.has_zstd for one in surveys) else "gz"


def pack(
    engine: Engine, image: Image, missing: frozenset[str], codec: Codec, folder: str, scratch: str
) -> Verb[tuple[Blob, tuple[Blob, ...]]]:
    """Write the configuration and these layers into a folder here, compressed. Raises UnavailableError.

    ``scratch`` is a folder of this ship's own on the same disk, for the uncompressed image.
    """
    tar = str(PurePath(scratch) / "image.tar")
    form = ("--format", "docker-archive") if engine == "podman" else ()
    (saved,) = yield (Command(argv=(engine, "save", *form, "--output", tar, image.reference), timeout_s=PACK_S),)
    if saved.returncode:
        raise UnavailableError(f"{engine} save {image.reference}: {_last(saved.stderr)}")
    (listed,) = yield (Command(argv=("tar", "-xOf", tar, "manifest.json"), timeout_s=LONG_S),)
    config, members = read_manifest(listed.stdout)
    if len(members) != len(image.layers):
        raise DdpctlError(f"{engine} save {image.reference} wrote {len(members)} layers of {len(image.layers)}")
    # The first of equal layers: Docker writes the others as links to it.
    wanted = dict(reversed([*zip((digest_hex(layer) for layer in image.layers), members, strict=True)]))
    blobs = [Blob(digest=PurePath(config).stem, name=f"{PurePath(config).stem}.json")]
    blobs += [Blob(digest=digest, name=f"{digest}.tar.{codec}") for digest in wanted if digest in missing]
    packed = []
    for blob in blobs:
        path = str(PurePath(folder) / blob.name)
        how = ("plain", config) if blob.name.endswith(".json") else (_COMPRESS[codec], wanted[blob.digest])
        argv = ("sh", "-c", _PACK, "sh", tar, how[1], path, how[0])
        (done,) = yield (Command(argv=argv, timeout_s=PACK_S),)
        if done.returncode:
            raise UnavailableError(f"cannot pack a layer of {image.reference}: {_last(done.stderr)}")
        packed.append(Blob(digest=blob.digest, name=blob.name, path=path, size=int(done.stdout)))
    old = ("find", folder, "-maxdepth", "1", "-type", "f", "-mtime", f"+{KEPT_DAYS}", "-delete")
    yield (Command(argv=old),)
    return packed[0], tuple(packed[1:])


def read_manifest(text: str) -> tuple[str, tuple[str, ...]]:
    """The members of a saved image's configuration and layers, of any Docker and of podman. Raises DdpctlError."""
    try:
        (manifest,) = json.loads(text)
        return manifest["Config"], tuple(manifest["Layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise DdpctlError(f"the saved image has no manifest that can be read: {error}") from None


def send(host: Host, blob: Blob, start: int) -> Verb[int]:
    """Send a piece of a blob; how many bytes of it the host has then. Raises UnavailableError."""
    length = min(PART_BYTES, blob.size - start)
    part = FilePart(path=blob.path, start=start, length=length)
    argv = ("sh", "-c", _RECEIVE, "sh", blob.name, str(start))
    (done,) = yield (Command(argv=argv, host=host, part=part, timeout_s=LONG_S),)
    if done.returncode:
        raise UnavailableError(f"{host}: {_last(done.stderr)}: ship again, it goes on where it was")
    return start + length


def check(host: Host, blob: Blob) -> Verb[None]:
    """Let the host see that it has got what was meant. Raises UnavailableError."""
    argv = ("sh", "-c", _CHECK, "sh", blob.name, blob.digest)
    (done,) = yield (Command(argv=argv, host=host, timeout_s=LONG_S),)
    if done.returncode:
        why = "its content is not what was sent" if done.returncode == 65 else _last(done.stderr)
        raise UnavailableError(f"{host}: {blob.name[:12]}: {why}: it was removed there, ship again")


def load(engine: Engine, host: Host, image: Image, config: Blob, names: tuple[str, ...]) -> Verb[Image]:
    """Put the image together on a host, from its blobs; what it then holds. Raises UnavailableError."""
    manifest = [
        {
            "Config": config.name,
            "RepoTags": [image.reference],
            "Layers": [f"{digest_hex(layer)}.tar" for layer in image.layers],
        }
    ]
    argv = ("sh", "-c", _LOAD, "sh", engine, json.dumps(manifest), config.name, *dict.fromkeys(names))
    (done,) = yield (Command(argv=argv, host=host, timeout_s=LONG_S),)
    if done.returncode:
        raise UnavailableError(f"{host}: {engine} load: {_last(done.stderr)}")
    (held,) = yield (Command(argv=inspect_line(engine, image.reference), host=host),)
    if held.returncode:
        raise UnavailableError(f"{host}: {image.reference} is not there after it was loaded: {_last(held.stderr)}")
    return read_inspect(image.reference, held.stdout)


def digest_hex(digest: str) -> str:
    """``sha256:0123...`` without its algorithm."""
    return digest.removeprefix("sha256:")


def _last(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else "it failed without a word"
