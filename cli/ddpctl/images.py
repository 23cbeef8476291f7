"""Container images as values: what Docker and podman report about one, and the command lines that ask. Pure.

Knows no host and no target; ``image_transfer`` copies an image to other machines, the targets run it.
"""

import json
from dataclasses import dataclass
from typing import Literal

Engine = Literal["docker", "podman"]
_VERSIONS = (
    "from importlib.metadata import version, PackageNotFoundError as E\n"
    "import platform; print('python', platform.python_version())\n"
    "for name in ('ddpctl', 'torch', 'torchvision', 'numpy'):\n"
    "  try: print(name, version(name))\n"
    "  except E: pass"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """What an engine holds under a reference."""

    reference: str  # as it was requested
    id: str  # sha256:... of its configuration: the same wherever the same image was built, pulled or loaded
    digests: tuple[str, ...]  # name@sha256:...: what registries call it; none before it was pushed or pulled
    layers: tuple[str, ...]  # sha256:... of every layer's uncompressed content, lowest first
    size: int  # bytes, uncompressed
    created: str
    architecture: str  # linux/amd64
    user: str
    entrypoint: tuple[str, ...]
    labels: dict[str, str]


def inspect_line(engine: Engine, reference: str) -> tuple[str, ...]:
    """The command whose stdout ``read_inspect`` reads."""
    return (engine, "image", "inspect", reference)


def read_inspect(reference: str, stdout: str) -> Image:
    """The image that Docker's or podman's ``image inspect`` tells of. Raises ValueError."""
    try:
        (record,) = json.loads(stdout)
        config = record.get("Config") or {}
        return Image(
            reference=reference,
            id=with_algorithm(record["Id"]),
            digests=tuple(record.get("RepoDigests") or ()),
            layers=tuple(record["RootFS"]["Layers"]),
            size=record["Size"],
            created=record["Created"],
            architecture=f"{record['Os']}/{record['Architecture']}",
            user=config.get("User") or "root",
            entrypoint=tuple(config.get("Entrypoint") or ()),
            labels=dict(config.get("Labels") or {}),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no answer of an image inspect: {error}") from None


def with_algorithm(digest: str) -> str:
    """``sha256:0123...``, also where podman leaves the algorithm out."""
    return digest if ":" in digest else f"sha256:{digest}"


def digest_of(reference: str) -> str | None:
    """The digest that a reference pins, or None: a tag may mean another image tomorrow."""
    _, at, digest = reference.partition("@")
    return digest if at else None


def difference(wanted: Image, found: Image) -> str:
    """Why ``found`` is not ``wanted``, with both digests; empty: they are the same image.

    By the ID of the configuration, or by any digest of a registry that both know: a registry may hold one image under
    another manifest, and an engine with containerd's store shows a manifest's digest as the ID.
    """
    digests = {digest_of(one) for one in wanted.digests} & {digest_of(one) for one in found.digests}
    if wanted.id == found.id or digests:
        return ""
    return f"{found.reference} is {pin(found)} there, but {pin(wanted)} is wanted"


def pin(image: Image) -> str:
    """What names an image for good: its digest in a registry, else its ID."""
    return next((digest for one in image.digests if (digest := digest_of(one))), image.id)


def build_line(
    engine: Engine, *, tag: str, dockerfile: str, context: str, build_args: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The command that builds an image."""
    options = [word for pair in build_args for word in ("--build-arg", pair)]
    return (engine, "build", "--file", dockerfile, "--tag", tag, *options, context)


def push_line(engine: Engine, reference: str) -> tuple[str, ...]:
    """The command that pushes an image to the registry of its name."""
    return (engine, "push", reference)


def versions_line(engine: Engine, reference: str) -> tuple[str, ...]:
    """The command that asks an image for the versions of what is in it, a line each."""
    options = ("--rm", "--network", "none", "--entrypoint", "python")
    return (engine, "run", *options, reference, "-c", _VERSIONS)


def human_size(size: int) -> str:
    """``1.2 GB``, in powers of ten as registries and engines count."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def show(image: Image, versions: str = "") -> list[str]:
    """``ddpctl image inspect`` for the user."""
    lines = [
        f"{image.reference}  {human_size(image.size)} in {len(image.layers)} layers, {image.architecture}",
        f"  id           {image.id}",
        *(f"  digest       {digest}" for digest in image.digests or ("none: it was neither pushed nor pulled",)),
        f"  created      {image.created}",
        f"  user         {image.user}",
        f"  entry point  {' '.join(image.entrypoint) or 'none'}",
    ]
    if versions:
        lines.append(f"  inside       {', '.join(versions.splitlines())}")
    return lines
