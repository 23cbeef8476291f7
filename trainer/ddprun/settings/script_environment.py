"""Finds out two things about a script from its source. The files are only read, and nothing is executed.

``set_before_torch`` returns the environment variables that the script sets before it imports torch. A forked rank
already has torch, so a variable that is read during the import of torch has no effect if the script sets it. The ranks
of such a script are executed instead of forked.

``may_train`` returns whether the script may create an optimizer or DDP. If it may, fork_server.py imports torch._dynamo
before it forks ranks.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

# Variables that are read only when they are needed, after the import of torch (tests/nightly/ddprun has those that need
# no GPU). CUDA, NCCL and cuBLAS read theirs when they are initialised, which only a script does.
READ_LATER_PREFIXES = ("MASTER_", "DDP_", "GLOO_", "HF_", "HYDRA_", "MLFLOW_", "NCCL_", "TORCH_NCCL_", "WANDB_")
READ_LATER = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "RANK", "TMPDIR", "TOKENIZERS_PARALLELISM", "TORCH_HOME", "WORLD_SIZE",
)  # fmt: skip
IMPORT_TORCH = frozenset(
    ("accelerate", "lightning", "pytorch_lightning", "timm", "torch", "torchaudio", "torchdata", "torchvision")
)
UNKNOWN = "variables whose names are not in its source"
MAX_BYTES = 1 << 20  # a longer file is no script


@functools.cache
def set_before_torch(script: Path, root: Path) -> tuple[str, ...]:
    """Return the variables that ``script``, or a module in ``root``, sets before torch is imported.

    Variables that are known to be read only later are left out. ``root`` is where Python looks for the script's own
    modules. Only the order of the source matters: all code above the import counts, even code inside a function. The
    result is empty for a file that cannot be read or parsed.
    """
    names = takewhile(bool, _names_set(script, root, set()))
    return tuple(dict.fromkeys(name for name in names if not is_read_later(name)))


def may_train(script: Path) -> bool:
    """Return whether ``script``, or a module that it imports, may create an optimizer or DDP.

    Imported modules are not read. So the answer is True for each script that imports anything except the standard
    library, torch and NumPy.
    """
    tree = _parse(script)
    if tree is None or any(word in script.read_bytes() for word in (b"optim", b"DistributedDataParallel")):
        return True
    nodes = list(ast.walk(tree))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    return any(name.partition(".")[0] not in (*sys.stdlib_module_names, "torch", "numpy") for name in modules)


def is_read_later(name: str) -> bool:
    """Return True if a variable is known to be read only after the import of torch, or not to be read at all."""
    return name in READ_LATER or name.startswith(READ_LATER_PREFIXES)


def _names_set(path: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    """Yield the variables that a source file sets, from top to bottom, and "" where it imports torch.

    When the file imports one of its own modules, this module is read before the rest of the file.
    """
    tree = None if path in seen else _parse(path)
    seen.add(path)
    nodes: list[tuple[ast.AST, bool]] = [(tree, True)] if tree else []  # the next one is the last
    while nodes:
        node, runs = nodes.pop()  # ``runs``: an import in a function does not run with the script
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node) if runs else ():
                first, *_ = parts = module.split(".")
                if first in IMPORT_TORCH:
                    yield ""
                for end in range(1, len(parts) + 1):
                    place = root.joinpath(*parts[:end])
                    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                        if first and file.is_file():
                            yield from _names_set(file, root, seen)
            continue
        yield from _variables_set(node)
        runs = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        children: list[ast.AST] = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            children = [*node.orelse]
        nodes += [(child, runs) for child in reversed(children)]


def _modules(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    module = statement.module or ""
    return [module, *(f"{module}.{alias.name}".strip(".") for alias in statement.names)]


def _parse(path: Path) -> ast.Module | None:
    """Return a source file's syntax tree, or None if there is an error. The rank itself reports the error."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:  # what is read from a pipe is lost to the rank
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _variables_set(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        if isinstance(node, ast.AugAssign) and _is_environ(node.target):
            return _keys(node.value)
        items = [target for target in targets if isinstance(target, ast.Subscript) and _is_environ(target.value)]
        return [_constant(item.slice) for item in items]
    if not isinstance(node, ast.Call):
        return []
    function, name = node.func, getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in ("putenv", "unsetenv"):
        return [_constant(node.args[0])] if node.args else []
    if name == "load_dotenv":
        return [UNKNOWN]
    if not (isinstance(function, ast.Attribute) and _is_environ(function.value)):
        return []
    if name in ("setdefault", "pop", "__setitem__", "__delitem__"):
        return [_constant(node.args[0])] if node.args else [UNKNOWN]
    if name == "update":
        given = [name for argument in node.args for name in _keys(argument)]
        return given + [keyword.arg or UNKNOWN for keyword in node.keywords]
    return [UNKNOWN] if name == "clear" else []


def _is_environ(node: ast.AST) -> bool:
    return "environ" in (getattr(node, "attr", ""), getattr(node, "id", ""))


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else UNKNOWN


def _keys(node: ast.AST) -> list[str]:
    """Return the keys of a dict literal, or UNKNOWN for any other expression."""
    if isinstance(node, ast.Dict):
        return [_constant(key) if key else UNKNOWN for key in node.keys]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
        return [keyword.arg or UNKNOWN for keyword in node.keywords]
    return [UNKNOWN]
