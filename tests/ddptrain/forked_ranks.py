"""Ranks of ddptrain as forks of one process that has imported torch: a start takes 0.1 s of CPU time, and not 1.7 s."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.utils.data", "torch.nn.parallel"])


def train(
    argv: Sequence[str], environs: Sequence[Mapping[str, str]], cwd: Path, timeout_s: float
) -> list[tuple[int, str, str]]:
    """Run `python -m ddptrain ARGV` in ``cwd`` with each environment, side by side.

    Return of each its exit code, stdout and stderr. Ranks that have not ended after ``timeout_s`` seconds are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(environs))]
        ranks = [
            _CONTEXT.Process(target=_run, args=([*argv], dict(environ), str(cwd), [str(path) for path in paths]))
            for environ, paths in zip(environs, outputs, strict=True)
        ]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        texts = [[path.read_text() if path.exists() else "" for path in paths] for paths in outputs]
        return [(process.exitcode or 0, out, err) for process, (out, err) in zip(ranks, texts, strict=True)]


def _run(argv: list[str], environ: dict[str, str], cwd: str, outputs: list[str]) -> None:
    for descriptor, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[0] = cwd  # as `python -m` has it
    sys.argv = ["ddptrain", *argv]
    runpy.run_module("ddptrain", run_name="__main__", alter_sys=True)
