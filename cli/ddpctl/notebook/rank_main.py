"""The program of each rank that runs a function of a notebook: ``python -m ddpctl.notebook.rank_main CALL_FILE``.

Each rank reads the call from the file and calls the function. Rank 0 writes the result to the folder of the file, and
a failed rank writes its traceback there. The program needs cloudpickle. It uses torch only if the function imports it.
"""

import io
import linecache
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

from ddpwire import names
from ddpwire.run_files import write_atomic

RESULT = "result.pkl"
FAILURE = "failure-rank-{rank}.pkl"


def main() -> int:
    """Call the function. Return 0, or 1 if it raised an exception."""
    call_file = Path(sys.argv[1])
    rank = int(os.environ.get(names.RANK, "0"))
    call = pickle.loads(call_file.read_bytes())  # noqa: S301 (ddpctl in this user's kernel wrote it)
    sys.path += [entry for entry in call["path"] if entry not in sys.path]
    for file, text in call["sources"].items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    function = None
    try:
        function, args, kwargs = pickle.loads(call["call"])  # noqa: S301
        result = function(*args, **kwargs)
        if rank == 0:
            write_atomic(call_file.parent / RESULT, _dumps(result))
    except Exception as error:
        story = _story(error, call["cells"], getattr(function, "__code__", None))
        write_atomic(call_file.parent / FAILURE.format(rank=rank), pickle.dumps(story))
        print(story["traceback"], end="", file=sys.stderr, flush=True)
        return 1
    return 0


def _story(error: Exception, cells: dict[str, str], code: CodeType | None) -> dict[str, Any]:
    """Return how and where a call failed, as a dictionary that can be pickled.

    The place is the last frame in a file of ``cells``. If there is no such frame, for example because the result cannot
    be pickled, the place is the first line of ``code``, the code of the function.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [index for index, frame in enumerate(frames) if frame.filename in cells]
    file, line = (code.co_filename, code.co_firstlineno) if code else ("the packed function", 1)
    if own:
        file, line = frames[own[-1]].filename, frames[own[-1]].lineno or line
    limited = traceback.TracebackException.from_exception(error)
    limited.stack = traceback.StackSummary.from_list(frames[own[0] if own else 0 :])
    text = "".join(limited.format() if frames else limited.format_exception_only())
    for sent, cell in cells.items():
        text = text.replace(f'File "{sent}"', f'File "{cell}"')
    try:
        original = _dumps(error)
    except Exception:  # the error has a value that cannot be pickled
        original = b""
    message = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return {"message": message, "cell": cells.get(file, file), "line": line, "traceback": text, "original": original}


def _dumps(value: object) -> bytes:
    """Pickle ``value`` with all tensors on the CPU, because the kernel must not use a GPU. Raises TypeError."""
    import cloudpickle

    torch = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                on_cpu = obj.detach().cpu()
                if isinstance(obj, torch.nn.Parameter):
                    on_cpu = torch.nn.Parameter(on_cpu, requires_grad=obj.requires_grad)
                return on_cpu.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the result, a {kind}, cannot be sent back to the notebook: {error}") from None
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
