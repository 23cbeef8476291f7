"""The cause of a rank's failure in one line, however its script ends."""

import pytest

CAUSES = {
    "exception": ("raise ValueError('bad label 17')", "ValueError: bad label 17"),
    "several lines": ("raise ValueError('line one\\nline two')", "ValueError: line one"),
    "long": ("raise ValueError('x' * 300)", f"ValueError: {'x' * 187}…"),
    "no words": ("raise StopAsyncIteration", "StopAsyncIteration"),
    "own class": ("class Bad(Exception): pass\nraise Bad('x')", "Bad: x"),
    "of a module": ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
    "syntax": ("x = (", "SyntaxError: '(' was never closed (script.py, line 1)"),
    "import": ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "group": ("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", "ExceptionGroup: two (2 sub-exceptions)"),
    "text": ("import sys; sys.exit('no such data')", "no such data"),
    "last words": (
        "import atexit; atexit.register(print, 'wandb: Synced 5 files')\nraise OSError('disk')", "OSError: disk"),
    "caught": (
        "import sys, traceback\ntry:\n  1 / 0\nexcept ZeroDivisionError:\n  traceback.print_exc()\nsys.exit(3)", ""),
    "number": ("import sys; sys.exit(7)", ""),
    "own error file": (
        "import json, os, sys\nwith open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "  json.dump({'message': {'message': 'no such shard', 'extraInfo': {}}}, file)\nsys.exit(7)", "no such shard"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_and_none_is_invented(runs, name, tmp_path):
    text, cause = CAUSES[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    node = runs.start(str(script))
    code = node.end()
    message = f"rank 0 on node 0 exited with {code}"
    assert code in (1, 3, 7)
    assert node.outcome().message[: len(message)] == message
    assert node.outcome().message[len(message) :].startswith(f": {cause}" if cause else "")
    assert bool(cause) == (node.outcome().message != message)
