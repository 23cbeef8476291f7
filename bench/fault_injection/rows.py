"""The table of faults and their limits, and the function that injects one of them once.

The rows are numbered as in docs/results/faults.md. tests/cluster/test_faults.py and tests/nightly/faults inject most
faults once. bench/faults.py injects each fault once or, as its options say, several times.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fault_injection import job as fault_job
from fault_injection.actions import (
    IMAGE,
    JOIN_S,
    agent_is_killed,
    cable_is_jolted,
    cable_is_out,
    cable_stays_out,
    link_is_slow,
    machine_is_lost,
    machine_is_lost_for_good,
    master_has_no_name,
    master_is_another,
    nodes_differ,
    port_is_taken,
    rank_eats,
    rank_fails,
    rank_is_frozen,
    rank_is_killed,
    rank_is_killed_again_and_again,
)
from fault_injection.experiment import Experiment
from fault_injection.job import TooLateError
from fault_injection.result import Bars, Result

HANG_S, SILENT_S = 5, 4  # --hang-timeout; after which silence a node is lost
OLDER = "import torch; torch.__version__ = '2.10.0'"
WORKERS = ("--workers", "2")
LOST = 10  # steps between checkpoints
PARTED = Bars(noticed_s=SILENT_S + 1, again_s=15, steps_lost=LOST)
STAYS_PARTED = Bars(noticed_s=SILENT_S + 1, ended_s=SILENT_S + JOIN_S + 10)
RECOVERS = Bars(noticed_s=1, again_s=15, steps_lost=LOST)
NODE_BACK = Bars(noticed_s=5, again_s=30, steps_lost=LOST)
FIRST_NODE_BACK = Bars(noticed_s=5, again_s=40, steps_lost=LOST)
AT_ONCE = Bars(noticed_s=1)
REFUSED = Bars(ended_s=5)
CONFIGS = ("lr: 0.1\n", "lr: 0.2\n")
HASHES = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in CONFIGS]
JOIN = ("--join-timeout", str(JOIN_S))


@dataclass(frozen=True, kw_only=True)
class Row:
    number: int
    title: str
    act: Callable[[Experiment], None]
    bars: Bars
    options: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()


ROWS = (
    Row(number=1, title="a rank is SIGKILLed", act=rank_is_killed, bars=RECOVERS),
    Row(
        number=2,
        title="a rank raises",
        act=rank_fails(1, "exited with 1: ValueError: bad label 17 in sample 1234"),
        bars=AT_ONCE,
        script_args=("--rank", "1", "--do", "raise@15"),
    ),
    Row(
        number=2,
        title="a rank segfaults",
        act=rank_fails(139, "was killed by SIGSEGV"),
        bars=AT_ONCE,
        script_args=("--rank", "1", "--do", "segv@15"),
    ),
    Row(
        number=2,
        title="a rank exits with 78",
        act=rank_fails(78, "exited with 78"),
        bars=AT_ONCE,
        script_args=("--rank", "1", "--do", "exit-78@15"),
    ),
    Row(
        number=3, title="the agent of node 1 is SIGKILLed", act=agent_is_killed(1), bars=NODE_BACK, script_args=WORKERS
    ),
    Row(number=3, title="the agent of node 0 is SIGKILLed", act=agent_is_killed(0), bars=FIRST_NODE_BACK),
    Row(number=4, title="machine 1 is lost, and comes back", act=machine_is_lost(1), bars=NODE_BACK),
    Row(
        number=4,
        title="machine 1 is lost for good",
        act=machine_is_lost_for_good,
        bars=Bars(noticed_s=5, ended_s=SILENT_S + JOIN_S + 10),
        options=JOIN,
    ),
    Row(number=5, title="machine 0 is lost, and comes back", act=machine_is_lost(0), bars=FIRST_NODE_BACK),
    Row(number=6, title="the cable of machine 1 is out for 2 s", act=cable_is_jolted, bars=Bars()),
    Row(number=6, title="the cable of machine 1 is out for 8 s", act=cable_is_out(1, 8.0), bars=PARTED),
    Row(number=6, title="the cable of machine 0 is out for 8 s", act=cable_is_out(0, 8.0), bars=PARTED),
    Row(
        number=6,
        title="the cable of machine 1 stays out",
        act=cable_stays_out(1),
        bars=STAYS_PARTED,
        options=JOIN,
    ),
    Row(
        number=6,
        title="the cable of machine 0 stays out",
        act=cable_stays_out(0),
        bars=STAYS_PARTED,
        options=JOIN,
    ),
    Row(number=7, title="the link of machine 1 is slow (2 Mbit/s)", act=link_is_slow, bars=Bars()),
    Row(
        number=9,
        title="a rank is frozen (SIGSTOP)",
        act=rank_is_frozen,
        bars=Bars(noticed_s=HANG_S + 2, again_s=HANG_S + 15, steps_lost=LOST),
        options=("--hang-timeout", str(HANG_S)),
    ),
    Row(number=14, title="the port is taken", act=port_is_taken, bars=Bars(ended_s=3)),
    Row(number=15, title="the master's name does not resolve", act=master_has_no_name, bars=REFUSED),
    Row(number=15, title="the master's address belongs to no node", act=master_is_another, bars=REFUSED),
    Row(
        number=17,
        title="another torch version (simulated)",
        act=nodes_differ(
            f"torch is 2.10.0 on node 1, but {torch.__version__} on node 0", {}, {"sitecustomize.py": OLDER}
        ),
        bars=REFUSED,
    ),
    Row(
        number=17,
        title="another image",
        act=nodes_differ(f"image is train:1@sha256:b2 on node 1, but {IMAGE} on node 0", image="train:1@sha256:b2"),
        bars=REFUSED,
    ),
    Row(
        number=17,
        title="another configuration",
        act=nodes_differ(
            f"sha256 of c.yaml is {HASHES[1]} on node 1, but {HASHES[0]} on node 0",
            *({"c.yaml": text} for text in CONFIGS),
        ),
        bars=REFUSED,
        script_args=("--config", "c.yaml"),
    ),
    Row(
        number=27,
        title="a rank eats all memory",
        act=rank_eats,
        bars=Bars(),
        script_args=("--rank", "2", "--do", "eat@15"),
    ),
    Row(
        number=28,
        title="a rank is killed again and again",
        act=rank_is_killed_again_and_again,
        bars=Bars(),
        script_args=("--rank", "1", "--do", "kill@15", "--pause", "0.02"),
    ),
)


def try_fault(
    row: Row, folder: Path, weights: str, *, seed: int, launcher: str = "ddprun", limit_s: float = 0.0
) -> Result:
    """Inject a fault once, on new machines. ``limit_s`` is passed to Experiment."""
    options = row.options if launcher == "ddprun" else ("--max-restarts", "3")
    job = fault_job.start_job(
        folder, prefix=f"r{row.number}-", launcher=launcher, options=options, script_args=row.script_args
    )
    with job as made:
        experiment = Experiment(made, random.Random(seed), weights, limit_s=limit_s)  # noqa: S311
        try:
            row.act(experiment)
        except TooLateError as error:
            return replace(experiment.result, timed_out=str(error))
        return experiment.result
