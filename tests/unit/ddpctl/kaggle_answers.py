"""What the kaggle client answered (tests/data/kaggle), and a stand-in that answers so from a PATH."""

import json
import shlex
import sys
from pathlib import Path

from ddpctl.command import Output

DATA = Path(__file__).parents[2] / "data" / "kaggle"


def answer(name: str) -> Output:
    """A recorded answer."""
    recording = json.loads((DATA / f"{name}.json").read_text())
    return Output(**{key: recording[key] for key in ("returncode", "stdout", "stderr")})


def argv(name: str) -> tuple[str, ...]:
    """The command line that was recorded."""
    return tuple(json.loads((DATA / f"{name}.json").read_text())["argv"])


def stand_in(folder: Path, answers: dict[str, str]) -> Path:
    """A ``kaggle`` in ``folder/bin`` that answers by the first two words of its command line, and keeps its lines."""
    program = folder / "bin" / "kaggle"
    program.parent.mkdir(parents=True, exist_ok=True)
    code = (
        "import json, pathlib, sys\n"
        f"with open({str(folder / 'requests')!r}, 'a') as file: file.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        f"name = {answers!r}[' '.join(sys.argv[1:3])]\n"
        f"answer = json.loads((pathlib.Path({str(DATA)!r}) / (name + '.json')).read_text())\n"
        "sys.stdout.write(answer['stdout']); sys.stderr.write(answer['stderr']); sys.exit(answer['returncode'])\n"
    )
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -c {shlex.quote(code)} "$@"\n')
    program.chmod(0o755)
    return program.parent


def requests(folder: Path) -> list[list[str]]:
    """The command lines that the stand-in was given."""
    path = folder / "requests"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
