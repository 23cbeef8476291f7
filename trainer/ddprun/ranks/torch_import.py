"""Handles a script's first import of torch in a forked rank. ddprun has imported torch before the fork.

A finder removes torch from sys.modules, so that the script finds the same modules as after exec. When the script
imports torch, the finder puts torch's modules back. By then, code that script_environment.py does not read (an
installed package) may have set variables that torch reads during its import. They have no effect in a forked rank, so
ddprun prints their names.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ddprun.settings.script_environment import is_read_later
from ddpwire import names


class FirstTorchImport(MetaPathFinder, Loader):
    """A finder for sys.meta_path that returns the torch module that was removed from sys.modules."""

    def __init__(self) -> None:
        self._modules = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == "torch"}
        self._environ = dict(os.environ)
        self._is_used = False
        self._spec: ModuleSpec = self._modules["torch"].__spec__  # type: ignore[assignment]

    def install(self) -> None:
        """Remove torch from sys.modules until the script imports it. torch must be in sys.modules before this call."""
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec for torch. Its submodules need none, because create_module puts them back into sys.modules."""
        if fullname != "torch" or self._is_used:
            return None
        real = self._spec
        spec = ModuleSpec(fullname, self, origin=real.origin, is_package=True)
        spec.submodule_search_locations = [*(real.submodule_search_locations or ())]
        spec.has_location, spec.cached = real.has_location, real.cached
        return spec

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's own loader, for example to read torch's source files."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Put all of torch's modules back into sys.modules."""
        self._is_used = True
        with contextlib.suppress(ValueError):  # the script has wrapped the finders
            sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec that importlib has replaced, and print which variables were set too late."""
        module.__spec__ = self._spec
        changed = {name for name, _ in self._environ.items() ^ dict(os.environ).items()}
        late = sorted(name for name in changed if not is_read_later(name))
        if late and os.environ.get(names.LOCAL_RANK) == "0":
            when = f"{', '.join(late)} changed before the import of torch, in code that ddprun does not read"
            why = "this has no effect, because torch was imported once for all ranks; use --exec"
            print(f"ddprun: {when}: {why}", file=sys.stderr)
