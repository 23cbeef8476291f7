"""Container images as values, and the commands of Docker and podman that inspect and build images."""

import json
from dataclasses import dataclass
from typing import Literal

Engine = Literal["docker", "podman"]
VERSIONS = (  # a program that prints the versions of the software in an image, one a line
    "from importlib.metadata import version, PackageNotFoundError as E\n"
    "import platform; print('python', platform.python_version())\n"
    "for name in ('ddpctl', 'torch', 'torchvision', 'numpy'):\n"
    "  try: print(name, version(name))\n"
    "  except E: pass"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, as Docker or podman describes it."""

    reference: str  # as it was requested
    id: str  # sha256:... of its configuration or, in containerd's image store, of a manifest
    digests: tuple[str, ...]  # name@sha256:..., as registries name it; empty until it is pushed or pulled
    layers: tuple[str, ...]  # sha256:... of every layer's uncompressed content, lowest first
    size: int  # bytes, uncompressed
    created: str
    architecture: str  # linux/amd64
    user: str
    entrypoint: tuple[str, ...]
    labels: dict[str, str]


def inspect_line(engine: Engine, reference: str) -> tuple[str, ...]:
    """Return the command whose stdout ``read_inspect`` parses."""
    return (engine, "image", "inspect", reference)


def read_inspect(reference: str, stdout: str) -> Image:
    """Parse the output of Docker's or podman's ``image inspect``. Raises ValueError."""
    try:
        (record,) = json.loads(stdout)
        config = record.get("Config") or {}
        return Image(
            reference=reference,
            id=record["Id"] if ":" in record["Id"] else f"sha256:{record['Id']}",  # podman leaves the algorithm out
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
        raise ValueError(f"cannot read the output of image inspect: {error}") from None


def difference(wanted: Image, held: Image) -> str:
    """Return how the images differ, or an empty string if they are the same image.

    Images are the same if they have the same ID or a common registry digest. Copies of one image can have different
    digests, because a registry may store the image with another manifest. Copies can also have different IDs, because
    in containerd's image store the ID is the digest of a manifest.
    """
    digests, others = ({name.partition("@")[2] for name in image.digests} for image in (wanted, held))
    if wanted.id == held.id or digests & others:
        return ""
    return f"{held.reference} is image {pin(held)}, but {pin(wanted)} was expected"


def pin(image: Image) -> str:
    """Return the digest of the image in a registry. If it has none, return its ID."""
    return image.digests[0].partition("@")[2] if image.digests else image.id


def human_size(size: int) -> str:
    """Return a size such as ``1.2 GB`` in powers of ten, as registries and engines do."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def show(image: Image, versions: str = "") -> list[str]:
    """Return the lines that ``ddpctl image inspect`` prints."""
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
