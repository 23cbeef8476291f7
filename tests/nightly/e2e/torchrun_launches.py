"""Launches of scripts under torchrun, ddprun and ``ddprun --exec``, and their page docs/results/torchrun.md.

Each case is one launch of a script of torchrun_table/ under each of the three. What the script observes, and what the
launcher prints and exits with, are the rows. A row that differs needs a reason in REASONS.
"""

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench.measuring import free_port
from tests import forks
from tests.e2e.driver import ROOT, wait_until

SCRIPTS = Path(__file__).parent / "torchrun_table"
PAGE = ROOT / "docs/results/torchrun.md"
LAUNCHERS = {"torchrun": ["torch.distributed.run"], "ddprun": ["ddprun"], "ddprun --exec": ["ddprun", "--exec"]}
TIMEOUT_S = 240
MAX_CHARS = 90  # of a value that is shown as it is
# Python's, this machine's or this checkout's: compared, and not shown.
NOT_SHOWN = (
    "atexit callbacks at the start",
    "gc.get_threshold()",
    "hash('a') with PYTHONHASHSEED=7",
    "sys.flags",
    "sys.getrecursionlimit()",
    "names in `__main__`",
    "resource limits",
    "sys.meta_path",
    "sys.path[1:]",
    "torch.manual_seed(7); torch.rand(1)",
    "multiprocessing start method",
    "nice",
    "umask",
    "warnings.filters",
)
STDIN = b"p answer + 1\nc\nthe first line\nthe second line\nno final newline"
# torchrun's own lines: a warning is a line, after an error or a traceback of its own nothing of a rank follows.
TORCHRUN_LINES = re.compile(
    r"^[WI]\d{4} [^\n]*torch/distributed/[^\n]*\n"
    r"|^(E\d{4} [^\n]*torch/distributed/|Traceback [^\n]*\n  File \"<frozen runpy>\").*",
    re.M | re.S,
)
DDPRUN_LINES = re.compile(r"^\[node0\] .*\n", re.M)
FAILED_RANK = re.compile(r"^  rank +: (\d+) |^\[node0\] .*?rank (\d+) on node 0 ", re.M)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch: ``command`` follows the launcher and its options."""

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    ddprun_options: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()  # if there are several: the number of ranks of each, on this machine
    stop: signal.Signals | None = None  # sent to the launcher once the script is ready
    executed: bool = False  # the launcher, in a session of its own; if not, it may be a fork (tests/forks.py)


CASES = {
    "one rank": Case(
        command=("probe.py", "--epochs", "3", ""),
        stdin=STDIN,
        env={"EXTRA": "é=1", "PYTHONWARNINGS": "default::DeprecationWarning", "PET_NNODES": "1"},
        executed=True,
    ),
    "output": Case(command=("./output.py",)),
    "children": Case(command=("children.py",), executed=True),
    "two ranks": Case(
        command=("two_ranks.py",),
        options=("--nproc-per-node", "2"),
        ddprun_options=("--no-prefix",),
        env={"OMP_NUM_THREADS": "1"},
        executed=True,
    ),
    "nodes of 2 and 1 ranks": Case(
        command=("uneven.py",), options=("--rdzv-id", "night"), nodes=(2, 1), env={"OMP_NUM_THREADS": "1"}
    ),
    "a script in another folder, sys.exit(3)": Case(
        command=("elsewhere/above_torch.py", "x"),
        env={"PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "1"},
        executed=True,
    ),
    "a module, sys.exit('text')": Case(command=("end", "text"), options=("-m",)),
    "a package, sys.exit(300)": Case(command=("package", "300"), options=("-m",)),
    "a folder, sys.exit(-1)": Case(command=("folder", "-1")),
    "a zip file, os._exit(5)": Case(command=("zipped.zip", "os._exit")),
    "a .pyc file that raises an exception": Case(command=("compiled.pyc", "raise")),
    "a relative import, a broken excepthook": Case(command=("end.py", "relative import")),
    "a symbolic link to a script that interrupts itself": Case(
        command=("link.py", "interrupt"), options=("--max-restarts", "0")
    ),
    "SIGSEGV": Case(command=("end.py", "segmentation fault")),
    "SIGKILL": Case(command=("end.py", "kill")),
    "a program without Python": Case(
        command=("sh", "-c", 'echo "$RANK of $WORLD_SIZE"; read -r line; echo "$line" >&2; exit 7'),
        options=("--no-python",),
        stdin=b"from stdin\n",
    ),
    "SIGTERM to the launcher": Case(command=("end.py", "wait"), stop=signal.SIGTERM, executed=True),
}

# Why a behaviour differs, in a sentence: of one case, "case: behaviour", or of all that have it, "behaviour".
OWN_CODE = "ddprun exits with the rank's own code, or with 128 + the number of the signal that killed it."
AGAIN = "ddprun restarts killed ranks. After three attempts without progress, it exits with 75."
STOPPED = "A stopped run is not a success, so ddprun exits with 143."
OWN_STORE = (
    "Under ddprun, a single rank serves its own store, so the processes that it spawns can use another port. "
    "Under torchrun, the agent serves the store."
)
IMPORTED = "A forked rank has the libraries that ddprun has already imported."
REASONS = {
    "exit code of the launcher": OWN_CODE,
    "SIGKILL: exit code of the launcher": AGAIN,
    "SIGKILL: stdout": AGAIN,
    "SIGSEGV: stderr": "ddprun sets PYTHONFAULTHANDLER, so the rank prints its stacks.",
    "SIGTERM to the launcher: exit code of the launcher": STOPPED,
    "output: a process that the rank leaves behind keeps running": "No process of a run outlives ddprun.",
    "children: mp.spawn of two processes that train": OWN_STORE,
    "children: stderr": OWN_STORE,
    "one rank: TORCHELASTIC_USE_AGENT_STORE": OWN_STORE,
    "one rank: modules at the start": IMPORTED,
    "one rank: atexit callbacks at the start": IMPORTED,
    "one rank: warnings.filters": IMPORTED,
    "one rank: gc.get_freeze_count() > 0": "Imports before the fork are frozen, so their pages stay shared.",
    "one rank: sys.meta_path": "An import finder gives a forked rank the torch that ddprun has imported.",
    "one rank: its parent is the launcher": "The ranks' parent is a supervisor, which ends them if ddprun is killed.",
    "one rank: signal at the parent's death": "A rank ends with its parent, even if the parent is killed.",
    "one rank: oom_score_adj is the same as the launcher's": (
        "If memory runs out, the kernel must kill a rank and not ddprun."
    ),
    "one rank: faulthandler.is_enabled()": "ddprun sets PYTHONFAULTHANDLER, so a rank that crashes prints its stacks.",
    "one rank: descriptors above 2": "A forked rank writes its stacks for ddpctl explain into a memory file.",
    "one rank: MASTER_ADDR": "The loopback address needs no name service.",
    "one rank: OMP_NUM_THREADS": (
        "ddprun divides the cores among the ranks. torchrun sets the variable only if there are several ranks, and "
        "then to 1."
    ),
    "one rank: PATH, HOME and other variables of the launcher": (
        "ddprun puts the folder of its Python before the others of PATH, for programs such as ninja."
    ),
    "one rank: PET_NNODES": (
        "The PET_* variables are meant for ddprun. A launcher that the script starts must not read them."
    ),
    "one rank: TORCHELASTIC_MAX_RESTARTS": "Without --max-restarts, ddprun restarts killed ranks up to 1000 times.",
    "one rank: TORCHELASTIC_SIGNALS_TO_HANDLE": "ddprun forwards all signals that request a stop.",
    "one rank: further variables": (
        "These variables name the network interface and the files for metrics, events and heartbeats."
    ),
    "two ranks: hash('a') differs from rank to rank": (
        "All forked ranks have the same hash seed, so their sets have the same order."
    ),
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A launch that is over."""

    code: int
    stdout: str
    stderr: str  # without the launcher's own lines
    failed_rank: str  # as the launcher names it
    ranks: list[dict[str, Any]]  # what each has observed


def prepare(folder: Path) -> None:
    """Copy the scripts, in all forms in which Python starts them."""
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    for other in ("elsewhere", "folder"):
        (folder / other).mkdir()
        shutil.copy(folder / "facts.py", folder / other)
    (folder / "above_torch.py").rename(folder / "elsewhere/above_torch.py")
    shutil.copy(folder / "package/__main__.py", folder / "folder")
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.write(folder / "package/__main__.py", "__main__.py")
        archive.write(folder / "facts.py", "facts.py")
    assert compileall.compile_file(folder / "end.py", quiet=1, legacy=True)
    (folder / "end.pyc").rename(folder / "compiled.pyc")
    (folder / "link.py").symlink_to("end.py")


def launch(case: Case, launcher: str, folder: Path) -> Ended:
    """Run a case under a launcher in a folder of its own."""
    prepare(folder)
    launcher_words = [*LAUNCHERS[launcher], *(case.ddprun_options if launcher != "torchrun" else ())]
    port = str(free_port())

    def words_of(node: int, count: int) -> list[str]:
        place = ("--nnodes", str(len(case.nodes)), "--node-rank", str(node), "--nproc-per-node", str(count))
        place = (*place, "--master-addr", "127.0.0.1", "--master-port", port) if case.nodes else ()
        return ["-m", *launcher_words, *place, *case.options, *case.command]

    arguments, *others = (words_of(node, count) for node, count in enumerate(case.nodes or (1,)))
    with tempfile.TemporaryDirectory() as temporary:  # a short path, as sockets need it
        env = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
        # As in an environment that is not activated.
        env |= {"PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": temporary, **case.env}
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if case.executed:
            env["PYTHONPATH"] += f"{os.pathsep}{folder}"  # for sitecustomize
            shell = ["/bin/sh", "-c", 'LAUNCHER_PID=$$ exec "$@"', "sh", sys.executable]
            process = subprocess.Popen([*shell, *arguments], cwd=folder, env=env, start_new_session=True, **pipes)
        else:
            process = forks.start(arguments, cwd=folder, env=env, **pipes)
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        nodes = [forks.start(other, cwd=folder, env=env, **silent) for other in others]
        with process:
            try:
                if case.stop:
                    ready = folder / "facts-0.json"
                    wait_until(lambda: ready.exists() and "is ready" in ready.read_text(), "the script", TIMEOUT_S)
                    process.send_signal(case.stop)
                out, err = process.communicate(case.stdin, TIMEOUT_S)
                assert [node.wait(TIMEOUT_S) for node in nodes] == [0] * len(nodes)
            finally:
                for node in nodes:
                    node.kill()
                process.kill()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def plain(text: str) -> str:
        for place, word in places(folder, temporary).items():
            text = text.replace(place, word)
        return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)

    print(f"==== {launcher}\n", out, err.decode(errors="replace"))
    stderr = plain(err.decode("utf-8", "backslashreplace"))
    ranks = [json.loads(plain(path.read_text())) for path in sorted(folder.glob("facts-*.json"))]
    if (kept := folder / "kept.txt").exists():
        ranks[0]["content of a file that is written and not closed"] = kept.read_text()
    failed = FAILED_RANK.findall(stderr)
    return Ended(
        code=process.returncode,
        stdout=plain(out.decode("utf-8", "backslashreplace")),
        stderr=(TORCHRUN_LINES if launcher == "torchrun" else DDPRUN_LINES).sub("", stderr),
        failed_rank=f"rank {''.join(failed[-1])}" if failed else "none",
        ranks=ranks,
    )


def places(folder: Path, temporary: str) -> dict[str, str]:
    """Return the paths of this machine, each with the word for it."""
    venv = {sys.executable: "PYTHON", sys.prefix: "VENV"}
    return {str(folder): "FOLDER", temporary: "TMP", **venv, str(ROOT): "REPO", sys.base_prefix: "PREFIX"}


def observed_by_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks observed, by name: a value, or those of both ranks where they differ."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    values = {name: [rank.get(name) for rank in ranks] for name in names}
    return {name: seen[0] if seen.count(seen[0]) == len(seen) else seen for name, seen in values.items()}


def end_grandchild(pid: int) -> bool:
    """Whether a process that a rank has left behind lives; it is ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.kill()
            return True
    return False


def observe(case: Case, ended: Ended) -> dict[str, Any]:
    """Return each behaviour of a launch, by its name."""
    seen = observed_by_ranks(ended.ranks)
    if "grandchild" in seen:
        seen["a process that the rank leaves behind keeps running"] = end_grandchild(seen.pop("grandchild"))
    streams = {"stdout": ended.stdout, "stderr": ended.stderr}
    if case.options[:1] == ("--nproc-per-node",):  # they write at the same time
        for name, text in streams.items():
            streams[name] = "\n".join(sorted(line for line in text.splitlines() if f" to {name}" in line))
    beginning, *parts = re.split(r"\n== (.*)\n", streams["stdout"])
    seen["stdout"] = beginning
    seen |= {f"stdout: {name}": text for name, text in zip(parts[::2], parts[1::2], strict=True)}
    seen["stderr"] = streams["stderr"]
    seen["exit code of the launcher"] = ended.code
    seen["the rank that the launcher names as failed"] = ended.failed_rank
    return seen


def rows_of(name: str, case: Case, ends: Mapping[str, Ended]) -> dict[str, list[str]]:
    """Return the cells of each behaviour: one if it is the same under all launchers, else theirs and the reason."""
    observed = [observe(case, ended) for ended in ends.values()]
    draws = [seen.pop("draws", {}) for seen in observed]
    rows = {}
    for behaviour in dict.fromkeys(key for seen in observed for key in seen):
        values = [seen.get(behaviour, "not observed") for seen in observed]
        cells = ["(value)" if behaviour in NOT_SHOWN else _cell(value) for value in values]
        if values.count(values[0]) == len(values):
            rows[behaviour] = [cells[0]]
        else:
            rows[behaviour] = [*cells, REASONS.get(f"{name}: {behaviour}", REASONS.get(behaviour, ""))]
    for draw in draws[0]:
        values = [drawn[draw] for drawn in draws]
        rows[draw] = ["different in each run"] if len({*values}) == len(values) else [*map(str, values), ""]
    return {f"{name}: {behaviour}": cells for behaviour, cells in rows.items()}


def _cell(value: object) -> str:
    """Return a value as a cell of the page: a long text only as what it is."""
    text = value if isinstance(value, str) else "None" if value is None else json.dumps(value, ensure_ascii=False)
    text = text.replace("\r", "␍").replace("\n", "␊").replace("|", "¦").strip(" ")
    text = re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02x}", text) or "empty"
    is_long = len(text) > MAX_CHARS and not isinstance(value, list)
    return {dict: "(values)"}.get(type(value), "(text)") if is_long else text


HEAD = """\
# What a script observes under torchrun and under ddprun

`tests/nightly/e2e/test_torchrun_table.py` writes this page. The test runs the same scripts under `torchrun`, `ddprun`
and `ddprun --exec`, and fails if it finds a difference for which it has no explanation. {same} behaviors are the same
under all three, {different} differ. To update the page: `make golden TESTS=tests/nightly/e2e/test_torchrun_table.py`

In the first column, the text before the colon names the launch, and the text after the colon what was observed.
`FOLDER` is the current folder, `PYTHON` the interpreter, `␊` a new line. `(text)`, `(value)` and `(values)` replace
values that are long, or that depend on Python or the machine. In the rows of `two ranks`, ddprun runs with
`--no-prefix`. Other names in capitals are environment variables. The test sets the variable `EXTRA` for the launcher.

"""


def page_of(rows: Mapping[str, list[str]]) -> str:
    different = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items() if len(cells) > 1]
    same = [f"| {name} | {cells[0]} |" for name, cells in rows.items() if len(cells) == 1]
    lines = [
        "## What differs",
        "",
        f"| launch: behavior | {' | '.join(LAUNCHERS)} | why |",
        "|---" * 5 + "|",
        *different,
    ]
    lines += ["", "## What is the same", "", "| launch: behavior | under all three |", "|---|---|", *same]
    return HEAD.format(same=len(same), different=len(different)) + "\n".join(lines) + "\n"


def rows_of_page() -> dict[str, list[str]]:
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in table if not cells[0].startswith("launch: ")}


def case_of(row: str) -> str:
    return next(name for name in CASES if row.startswith(f"{name}: "))


def observe_all(name: str, case: Case, folder: Path) -> dict[str, list[str]]:
    """Run a case under all launchers at the same time, and return its rows."""
    with ThreadPoolExecutor(len(LAUNCHERS)) as threads:
        ends = {
            launcher: threads.submit(launch, case, launcher, folder / launcher.replace(" ", ""))
            for launcher in LAUNCHERS
        }
        return rows_of(name, case, {launcher: future.result() for launcher, future in ends.items()})
