"""Finds out two things about a script from its source. The files are only read, and nothing is executed.

``set_before_torch`` returns the environment variables that the script sets before it imports torch. A forked rank
already has torch, so a variable that is read during the import of torch has no effect if the script sets it. The ranks
of such a script are executed instead of forked.

``may_train`` returns whether the script may create an optimizer or DDP. If it may, fork_server.py imports torch._dynamo
before it forks ranks.
"""

import ast
import contextlib
import functools
import sys
from collections.abc import Iterator
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
    return tuple(dict.fromkeys(name for name in _Reader(root).read(script) if not is_read_later(name)))


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


class _TorchIsImportedError(Exception):
    """Raised when the reader reaches the import of torch. Variables that are set later do not affect this import."""


class _Reader:
    """Reads a script from top to bottom.

    When the script imports one of its own modules, this module is read before the rest of the script.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[Path] = set()
        self._names: list[str] = []

    def read(self, script: Path) -> list[str]:
        with contextlib.suppress(_TorchIsImportedError):
            self._file(script)
        return self._names

    def _file(self, path: Path) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        if tree := _parse(path):
            self._block(tree.body, runs=True)

    def _block(self, body: list[ast.stmt], *, runs: bool) -> None:
        """Read statements. Imports count only if ``runs`` is set. It is not set for statements inside a function."""
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if runs:
                    self._import(statement)
                continue
            inner = runs and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            blocks = [block for _, block in ast.iter_fields(statement) if _is_block(block)]
            for expression in _expressions(statement):
                self._names += _variables_set(expression)
            if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
                blocks = [statement.orelse]
            for block in blocks:
                for part in block:
                    if isinstance(part, ast.ExceptHandler | ast.match_case):
                        self._block(part.body, runs=inner)
                    else:
                        self._block([part], runs=inner)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        else:
            module = statement.module or ""
            modules = [module, *(f"{module}.{alias.name}".strip(".") for alias in statement.names)]
        for module in modules:
            first, *_ = parts = module.split(".")
            if first in IMPORT_TORCH:
                raise _TorchIsImportedError
            for end in range(1, len(parts) + 1):
                place = self._root.joinpath(*parts[:end])
                for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                    if first and path.is_file():
                        self._file(path)


def _parse(path: Path) -> ast.Module | None:
    """Return a source file's syntax tree, or None if there is an error. The rank itself reports the error."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:  # what is read from a pipe is lost to the rank
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_block(value: object) -> bool:
    kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return isinstance(value, list) and bool(value) and isinstance(value[0], kinds)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement itself and all its nodes, except the nodes of nested statements."""
    yield statement
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            waiting += ast.iter_child_nodes(node)


def _variables_set(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        found = [_constant(one.slice) for one in targets if isinstance(one, ast.Subscript) and _is_environ(one.value)]
        merged = isinstance(node, ast.AugAssign) and _is_environ(node.target)
        return found + (_keys(node.value) if merged and isinstance(node, ast.AugAssign) else [])
    if not isinstance(node, ast.Call):
        return []
    function, name = node.func, getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in ("putenv", "unsetenv"):
        return [_constant(node.args[0])] if node.args else []
    if name in ("load_dotenv", "dotenv_values"):
        return [UNKNOWN] if name == "load_dotenv" else []
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
