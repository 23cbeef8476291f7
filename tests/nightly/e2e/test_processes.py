"""The verbs on a run of eight ranks, a rank's own exit code, and one rank for two GPUs."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.e2e.driver import SCRIPTS, ddpctl, node_log, outcome_of, processes_of, start, wait_until
from tests.in_process import ddpctl as in_process

IDLE = str(SCRIPTS / "idle.py")
EXIT_WITH = Path(__file__).parent / "scripts/exit_with.py"


def ranks_up(tmp_path: Path, run: str, nodes: int) -> list[int]:
    return [
        int(rank)
        for node in range(nodes)
        for rank in re.findall(r"rank (\d) of \d idles", node_log(tmp_path, run, node))
    ]


def status_with_ranks(run: str) -> Any:
    """What ``ddpctl status`` says once each node has recorded its ranks: after all of them have started."""
    status: Any = {}

    def recorded() -> bool:
        status.update(json.loads(ddpctl("status", run, "--json").stdout))
        return all(report["state"]["ranks"] for report in status["node_reports"])

    wait_until(recorded, "the ranks in each node's state")
    return status


def test_each_verb_shows_the_eight_ranks_of_a_detached_run(tmp_path: Path) -> None:
    launched = ddpctl("launch", "--nodes", "2", "--gpus", "4", "--detach", "--name", "eight", "--", IDLE)
    assert (launched.returncode, launched.stdout) == (0, "eight\n")
    (note,) = [line for line in launched.stderr.splitlines() if "gloo" in line]
    assert re.search(r"\bno GPU\b.*\b8 CPU ranks\b", note)
    wait_until(lambda: sorted(ranks_up(tmp_path, "eight", 2)) == list(range(8)), "eight ranks")

    listed = ddpctl("ps").stdout.splitlines()
    assert listed[0].split() == ["RUN", "STATE", "EXIT", "STEP", "SIZE", "TARGET", "LAUNCHED", "PROGRAM"]
    assert re.fullmatch(rf"eight  running  -     -     2 x 4  local   \d+ s ago +{re.escape(IDLE)}", listed[1])

    status = status_with_ranks("eight")
    assert (status["state"], status["code"]) == ("running", None)  # its ranks report no steps
    assert [[rank["rank"] for rank in report["state"]["ranks"]] for report in status["node_reports"]] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]

    lines = ddpctl("logs", "eight", "--rank", "5").stdout
    assert re.fullmatch(r"\[node1 rank5\] rank 5 of 8 idles, child \d+\n", lines)
    timed = ddpctl("logs", "eight", "--timestamps").stdout.splitlines()
    assert timed == sorted(timed, key=lambda line: line.split()[0])
    origins = {re.sub(r"^2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\[.*?\]) .*", r"\1", line) for line in timed}
    assert origins >= {f"[node{rank // 4} rank{rank}]" for rank in range(8)}
    assert origins <= {"[node0]", "[node1]"} | {f"[node{rank // 4} rank{rank}]" for rank in range(8)}
    few = ddpctl("logs", "eight", "--timestamps", "--rank", "6", "--tail", "1").stdout
    assert few == next(line for line in timed if "rank6]" in line) + "\n"
    following = start("logs", "-f", "eight")
    stopped = ddpctl("stop", "eight")
    assert (stopped.returncode, processes_of("eight")) == (0, {})
    output, _ = following.communicate(timeout=20)
    assert following.returncode == 0
    assert sorted(re.findall(r"^\[node\d rank\d\] rank (\d) of 8", output, re.M)) == list("01234567")
    assert json.loads(ddpctl("status", "eight", "--json").stdout)["code"] == 143
    again = ddpctl("stop", "eight")
    assert (again.returncode, "'eight'" in again.stderr) == (0, True)


def test_the_exit_code_of_a_rank_is_that_of_the_run(tmp_path: Path) -> None:
    script = str(EXIT_WITH)
    done = ddpctl("launch", "--nodes", "2", "--gpus", "2", "--name", "three", "--", script, "2", "3")
    assert done.returncode == 3, done.stdout + done.stderr
    outcome = outcome_of(tmp_path, "three")
    assert (outcome.code, outcome.cause, outcome.rank, outcome.node, outcome.retry) == (3, "error", 2, 1, False)
    assert outcome.message in done.stdout
    status = json.loads(ddpctl("status", "three", "--json").stdout)
    assert (status["state"], status["code"], status["outcome"]) == ("failed", 3, asdict(outcome))
    summary = in_process("status", "three").stdout.splitlines()[0]
    assert [fact for fact in ("three", "failed", "exit code 3", outcome.message) if fact not in summary] == []


def test_one_rank_may_have_two_gpus(tmp_path: Path) -> None:
    script = tmp_path / "place.py"
    script.write_text("import os\nprint('place', os.environ['RANK'], 'in', os.environ['WORLD_SIZE'])\n")
    done = ddpctl("launch", "--gpus", "2", "--ranks", "1", "--name", "one", "--", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall("place . in .", node_log(tmp_path, "one", 0)) == ["place 0 in 1"]
    status = json.loads(ddpctl("status", "one", "--json").stdout)
    assert (status["gpus"], status["ranks"]) == (2, 1)
    (note,) = [line for line in done.stderr.splitlines() if "gloo" in line]
    assert re.search(r"\b1 CPU rank\b", note)
