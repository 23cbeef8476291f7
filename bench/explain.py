"""Count how often ``ddpctl explain`` names the right cause, and how often it finds a fault in a healthy run.

    python bench/explain.py [--wait 32] [--torchrun] [CASE...]

Each case launches a script of bench/explain_cases with 4 ranks on this machine and injects one cause. The cases of
explain_cases/nodes.py run on two machines made of network namespaces, with 2 ranks each, and need root. CAUSES, the
expected results, was written before the code that names the causes. NOT_INJECTED lists causes that were not tested.

Each case prints a line: named (the right cause and rank), wrong (another cause or rank) or unknown. For a healthy case,
the line is wrong if a fault is found, and otherwise named. The last lines have the counts.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measuring
from explain_cases import nodes
from measuring import runtime_files

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S, TRAINED_S = 120.0, 4.0
AT_ONCE = 8  # runs at the same time
GROUP_TIMEOUT_S = 20  # torch's default for gloo is 30 minutes
ERROR = re.compile(r"(\[rank\d\]: )?(?!.*ChildFailedError)[\w.]*(Error|Exception)\b")
ANY = -1  # any rank may be named, or none
NO_RANK = None
# case → the causes of ddpctl.diagnosis.explain that are right, and the rank
CAUSES: dict[str, tuple[tuple[str, ...], int | None]] = {
    "sleeps": (("missing",), 1),
    "other_size": (("mismatch",), ANY),
    "other_type": (("mismatch",), ANY),
    "other_operation": (("mismatch",), 1),
    "skips_one": (("mismatch",), 1),
    "barrier_in_a_branch": (("mismatch",), 1),
    "other_order": (("order",), ANY),
    "subgroup_lacks_one": (("missing",), 1),
    "no_sender": (("missing",), 1),
    "never_joins": (("no_group",), 1),
    "new_group_in_one_rank": (("missing",), 1),
    "raises": (("failed",), 1),
    "exits_3": (("failed",), 1),
    "exits_0": (("ended_early",), 1),
    "is_killed": (("failed",), 1),
    "segfaults": (("failed",), 1),
    "aborts": (("failed",), 1),
    "uneven_inputs": (("ended_early",), 1),
    "disk_full": (("disk_full",), 1),
    "data_missing": (("failed",), 1),
    "loss_is_nan": (("failed",), 1),
    "is_stopped": (("stopped_process",), 1),
    "waits_for_a_lock": (("missing",), 1),
    "joins_a_thread": (("missing",), 1),
    "waits_for_a_file_lock": (("missing",), 1),
    "waits_for_a_process": (("missing",), 1),
    "waits_for_the_network": (("missing",), 1),
    "reads_a_pipe": (("missing",), 1),
    "waits_for_stdin": (("missing",), 1),
    "computes": (("missing",), 1),
    "holds_the_gil": (("missing",), 1),
    "checkpoint_blocks": (("checkpoint",), 1),
    "worker_stalls": (("data_loader",), 1),
    "data_stalls": (("data_loader",), 1),
    "worker_is_stopped": (("data_loader",), 1),
    "worker_raises": (("failed",), 1),
    "stream_ends_early": (("ended_early",), 1),
    "slow_data_in_one_rank": (("data_loader", "straggler"), 1),
    "slow_data": (("data_loader",), ANY),
    "unused_parameters": (("unused_parameters",), ANY),
    "unused_parameters_in_one_rank": (("missing", "unused_parameters"), ANY),
    "straggler": (("straggler",), 1),
    "sleeps_before_backward": (("missing",), 1),
    "receives_in_a_ring": (("send_recv",), NO_RANK),
    "sender_sleeps": (("missing",), 1),
    "reports_nan": (("nan",), 1),
    "ddptrain_diverges": (("nan",), ANY),
    # from here on with 2 nodes: a link is at fault, and no rank
    "ports_blocked": (("network", "failed"), NO_RANK),
    "link_is_down": (("network",), NO_RANK),
    "link_of_ranks_is_down": (("network",), NO_RANK),
    "link_is_half_open": (("network",), NO_RANK),
    "link_is_slow": (("network",), NO_RANK),
    "memory_limit": (("oom",), 1),
    "node_at_half_speed": (("straggler",), NO_RANK),
    "disk_does_not_write": (("checkpoint", "missing"), 1),
    "disk_reads_slowly": (("missing",), 1),
    # explain_cases/invented.py
    "flock_around_barrier": (("missing",), ANY),
    "fork_child_lock": (("missing",), 1),
    "prefetch_thread_died": (("missing",), 1),
    "swallowed_pickle_error": (("mismatch",), 1),
    "data_dependent_branch": (("unused_parameters",), ANY),
    "adapter_param_count": (("mismatch",), ANY),
    "regex_backtracking": (("missing",), 1),
    "busy_thread_gil": (("straggler",), 1),
    "gc_collect_each_step": (("straggler",), 1),
    "threads_swapped_order": (("mismatch", "order"), 1),
}
# what a sentence must contain besides
WORDS = {
    "disk_does_not_write": "disk",
    "reports_nan": "step 12",
    "node_at_half_speed": "node 1",
    "disk_reads_slowly": "disk",
    "ports_blocked": "10.77.0.10:",
} | dict.fromkeys(("link_is_down", "link_of_ranks_is_down", "link_is_half_open", "link_is_slow"), "node 1")
NOT_INJECTED = ("NCCL and GPU faults",)


ENV = os.environ | {"PYTHONPATH": f"{ROOT}/cli:{ROOT}/trainer:{ROOT}/bench"}


@contextlib.contextmanager
def launched(name: str, folder: Path) -> Iterator[Callable[[], None]]:
    """Start 4 ranks on this machine. Yield a function that does nothing: the script injects the cause itself."""
    options = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "0", "--grace", "1"]
    options += ["--run-dir", str(folder / "run")]
    command = [sys.executable, "-P", "-m", "ddprun", *options, str(nodes.CASE_FILES[name]), name]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield lambda: None
    finally:
        process.terminate()
        process.wait()


def wait_until_started(run: Path, ranks_met: int) -> None:
    """Wait until ``ranks_met`` ranks have begun to create their process group, or until the run has ended."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = [*run.glob("node-*/outcome.json")]
        if ended or len(runtime_files(run, "heartbeat/rank-*.group")) >= ranks_met:
            return
        time.sleep(0.2)


def explained(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "ddpctl", "explain", "--json", str(run)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    return dict(json.loads(done.stdout)) if done.stdout else {"cause": "unknown", "sentence": done.stderr.strip()}


def judge(name: str, explanation: dict[str, Any]) -> str:
    if name not in CAUSES:
        return "wrong" if explanation.get("fault") else "named"
    causes, rank = CAUSES[name]
    if explanation["cause"] in ("unknown", "none"):
        return "unknown"
    is_right = (
        explanation["cause"] in causes
        and rank in (ANY, explanation["rank"])
        and WORDS.get(name, "") in explanation["sentence"]
    )
    return "named" if is_right else "wrong"


@contextlib.contextmanager
def by_torchrun(name: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the same ranks with torchrun. The process group has a short time-out and dumps its flight recorder."""
    folder.mkdir()
    env = ENV | {
        "EXPLAIN_TIMEOUT_S": str(GROUP_TIMEOUT_S),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump_"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([*command, str(nodes.CASE_FILES[name]), name], env=env, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def torchrun_says(process: subprocess.Popen[bytes], folder: Path, began: float) -> tuple[str, str]:
    """Return two texts.

    The first consists of torchrun's root cause, the last error line and the exit code. The second is the last line that
    torchfrtrace prints about the dumps.
    """
    text = (folder / "output").read_text(errors="replace")
    errors = [line for line in text.splitlines() if ERROR.match(line)]
    root = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", text, re.DOTALL)
    sentences = [f"root cause: rank {root[1]}, exit code {root[2]}"] if root else []
    sentences += [re.sub(r"\[/[^]]*\] ?", "", errors[-1])[:90]] if errors else []
    ended = "it waits on" if process.poll() is None else f"exit code {process.returncode}"
    runs_s = f"nothing in {time.monotonic() - began:.0f} s"
    if not [*folder.glob("dump_*")]:
        return f"{'; '.join(sentences) or runs_s} ({ended})", "no dump"
    command = [str(Path(sys.executable).with_name("torchfrtrace")), "--prefix", "dump_", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{'; '.join(sentences) or runs_s} ({ended})", (done.stdout + done.stderr).strip().rpartition("\n")[2][:90]


def compare_with_torchrun(names: Sequence[str], wait_s: float) -> None:
    """Print what torchrun and torchfrtrace report about each case."""
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        for first in range(0, len(names), AT_ONCE):
            with contextlib.ExitStack() as stack:
                batch = {name: Path(folder, name) for name in names[first : first + AT_ONCE]}
                began = time.monotonic()
                launched = {name: stack.enter_context(by_torchrun(name, path)) for name, path in batch.items()}
                deadline = began + START_TIMEOUT_S + GROUP_TIMEOUT_S + wait_s
                while any(torchrun.poll() is None for torchrun in launched.values()) and time.monotonic() < deadline:
                    time.sleep(0.5)
                for name, process in launched.items():
                    print(f"{name:32} {' | '.join(torchrun_says(process, batch[name], began))}", flush=True)


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--wait", type=float, default=32.0, help="seconds between the start and the question")
    parser.add_argument("--torchrun", action="store_true", help="show instead what torchrun and torchfrtrace say")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    healthy = [name for name in (*nodes.CASE_FILES, *nodes.INJECTIONS) if name.startswith("healthy_")]
    names = args.cases or [*CAUSES, *healthy]
    if args.torchrun:
        here = [name for name in names if name in CAUSES and name not in nodes.INJECTIONS]
        compare_with_torchrun(here, args.wait)
        return
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        for first in range(0, len(names), AT_ONCE):
            batch = {name: Path(folder, name) for name in names[first : first + AT_ONCE]}
            with contextlib.ExitStack() as stack:
                launch = {name: nodes.launched if name in nodes.INJECTIONS else launched for name in batch}
                inject = [stack.enter_context(launch[name](name, path)) for name, path in batch.items()]
                for path in batch.values():
                    wait_until_started(path / "run", ranks_met=3)
                time.sleep(TRAINED_S)
                for act in inject:
                    act()
                time.sleep(args.wait)
                for name, path in batch.items():
                    began = time.monotonic()
                    explanation = explained(path / "run")
                    took_s = time.monotonic() - began
                    result = judge(name, explanation)
                    counts[f"{'faults' if name in CAUSES else 'healthy'}: {result}"] += 1
                    line = f"{result:8} {name:32} {explanation['cause']:16} {took_s:4.1f} s  {explanation['sentence']}"
                    print(line, flush=True)
    print(dict(counts), "load", os.getloadavg())
    print(f"not injected here: {', '.join(NOT_INJECTED)}")


if __name__ == "__main__":
    main()
