"""Serializes a function, its arguments and its source code with cloudpickle, for the ranks.

If a value cannot be serialized, the error message contains the name of the value. This module checks values for tensors
without importing torch. A value can only be a tensor if the kernel has imported torch.
"""

import inspect
import io
import linecache
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.text import one_line

LARGE_BYTES = 200 << 20


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Serialize a call for the ranks.

    Raises UnavailableError if cloudpickle is not installed, and ConfigError if the call cannot be sent to the ranks.
    """
    try:
        import cloudpickle
    except ImportError:
        raise UnavailableError(
            f"sending a function needs cloudpickle, which {sys.executable} lacks: pip install cloudpickle"
        ) from None
    called = f"{name_of(function)}()"
    parts = [("argument", f"args[{number}]", value) for number, value in enumerate(args)]
    parts += [("argument", name, value) for name, value in kwargs.items()]
    used = _used(function)
    parts += used
    for kind, name, value in parts:
        if on := _device_of(value):
            raise ConfigError(
                f"{called} cannot be sent to the ranks: the {kind} {name} is a tensor on {on} of "
                f"this process: use {name}.cpu(), and move the tensor to the rank's device in {called}"
            )
    dumps = partial(_dumps, cloudpickle.Pickler)
    try:
        call = dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # an object's __reduce__ may raise anything
        raise ConfigError(_culprit(dumps, called, parts, error)) from None
    if len(call) > LARGE_BYTES:
        raise ConfigError(
            f"{called} and the values that it uses have {len(call) >> 20} MB, but the limit is {LARGE_BYTES >> 20} MB: "
            f"load large data inside {called}, on each rank"
        )
    functions = [part for part in (function, *(value for *_, value in used)) if isinstance(part, FunctionType)]
    files = sorted({part.__code__.co_filename for part in functions})
    sources = {file: "".join(linecache.getlines(file)) for file in files}
    return pickle.dumps(
        {"call": call, "sources": sources, "cells": {file: cell_of(file) for file in files}, "path": list(sys.path)}
    )


def _dumps(pickler: Any, value: object) -> bytes:
    """Serialize a value with ``pickler`` (cloudpickle.Pickler). Functions in the value keep their file names.

    Since version 3.1.3, cloudpickle replaces these names with ``<dynamic-code>``. But the error messages of a rank need
    the file names, to show in which cell an error occurred.
    """
    reduce_code = pickler.dispatch_table[CodeType]

    def keep_file_name(code: CodeType) -> tuple[Any, ...]:
        make, arguments = reduce_code(code)
        return make, tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)

    table = ChainMap({CodeType: keep_file_name}, pickler.dispatch_table)
    buffer = io.BytesIO()
    type("Pickler", (pickler,), {"dispatch_table": table})(buffer).dump(value)
    return buffer.getvalue()


def cell_of(file: str) -> str:
    """Return the name of the cell whose code is in ``file``, such as ``Cell In[3]``.

    Return ``file`` itself if it does not belong to a cell.
    """
    compiler = getattr(_ipython(), "compile", None)
    names = getattr(compiler, "format_code_name", None)
    cell = names(file) if names else None
    return " ".join(cell) if cell else file


def _ipython() -> Any:
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, such as ``train``."""
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def full_name(function: Callable[..., Any]) -> str:
    """Return a function's name with its module (unless ``__main__``), such as ``recipes.Trainer.fit()``."""
    function = _unwrapped(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = "" if named.__module__ == "__main__" else f"{named.__module__}."
    return f"{module}{named.__qualname__}()"


def source_of(function: Callable[..., Any]) -> str:
    """Return the path of the file that defines the function.

    For a function in a cell, return the path of the notebook, or the current folder if the notebook is unknown.
    """
    file = getattr(getattr(_unwrapped(function), "__code__", None), "co_filename", "")
    if cell_of(file) == file and Path(file).is_file():
        return os.path.realpath(file)
    # VS Code sets a variable in the namespace of its kernels. jupyter_server sets an environment variable.
    named = getattr(_ipython(), "user_ns", {}).get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    return os.path.realpath(named if str(named).endswith(".ipynb") and Path(named).is_file() else Path.cwd())


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _device_of(value: object) -> str:
    """Return the device of a tensor or module on a GPU, such as ``cuda:0``, or an empty string for other values."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    tensor: Any = next(iter(value.parameters()), None) if isinstance(value, torch.nn.Module) else value
    on_host = not isinstance(tensor, torch.Tensor) or tensor.device.type in ("cpu", "meta")
    return "" if on_host else str(tensor.device)


def _used(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Return the kind, name and value of each outer variable that a function uses.

    If such a variable is a function that a rank cannot import, its outer variables are included, too.
    """
    used: list[tuple[str, str, Any]] = []
    visited: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        function = waiting.pop(0)
        if not isinstance(function, FunctionType) or id(function) in visited:
            continue
        if function.__module__ != "__main__" and function.__module__ in sys.modules:
            continue  # a rank imports it, so it is not serialized
        visited.add(id(function))
        try:
            around = inspect.getclosurevars(function)
        except (TypeError, ValueError):  # a variable of the closure has no value yet
            continue
        for kind, values in (("variable", around.nonlocals), ("global variable", around.globals)):
            used += [(kind, name, value) for name, value in values.items() if not isinstance(value, ModuleType)]
            waiting += values.values()
    return used


def _culprit(dumps: Callable[[Any], bytes], called: str, parts: list[tuple[str, str, Any]], error: Exception) -> str:
    cause, names = error, "it "
    for kind, name, value in parts:
        try:
            dumps(value)
        except Exception as own:  # functions that use the value fail, too; the last is the innermost
            cause, names = own, f"the {kind} '{name}' (a {type(value).__qualname__}) "
    reason = one_line(str(cause).splitlines()[0] if str(cause) else type(cause).__name__).removesuffix(".")
    return (
        f"{called} cannot be sent to the ranks, because {names}cannot be pickled: {reason}. "
        f"Create the value inside {called}, from data that you pass as arguments"
    )
