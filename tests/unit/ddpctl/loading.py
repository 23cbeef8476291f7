"""A ddpctl.yaml in the current folder, loaded for targets that exist here only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from ddpctl import config
from ddpctl.spec import Doc


@dataclass(frozen=True, kw_only=True)
class Local:
    pass


@dataclass(frozen=True, kw_only=True)
class Ssh:
    hosts: Annotated[tuple[str, ...], Doc("Where.")]
    user: Annotated[str | None, Doc("Who; null: you.")] = None
    check: Annotated[bool, Doc("Whether to look first.")] = True
    tries: Annotated[int, Doc("How often."), Ge(1)] = 1


KINDS = {"local": lambda: Local, "ssh": lambda: Ssh}


def load(
    text: str | bytes | None = None, *, profile: str | None = None, target: str | None = None, **flags: Any
) -> config.Settings:
    file = None
    if text is not None:
        file = Path("ddpctl.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load(file=file, profile=profile, target=target, overrides=flags, kinds=KINDS)
