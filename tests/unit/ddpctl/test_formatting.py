"""How runs, hosts and what programs print are shown on a terminal."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.records import run_of

from ddpctl.commands import formatting, runs
from ddpctl.commands.arguments import run_arguments
from ddpctl.commands.machines import hosts_table
from ddpctl.errors import UsageError
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.runs import run_store
from ddpctl.runs.run_status import NodeReport, Progress, RunStatus, State
from ddpctl.runs.run_store import Run
from ddpctl.targets import CpuRun, GpuReport, HostReport
from ddpctl.text import EscapeFilter, cut, format_duration, plain
from ddpwire.run_files import NodeState, Notice, Outcome, RankProcess, read_node

RUN = run_of(created=time.time(), job=JobSpec(name="night", nodes="1", gpus=2, command=("train.py",)))
NODE = NodeState(
    run="night",
    node=0,
    pid=4711,
    state="training",
    started=0.0,
    metrics="http://127.0.0.1:9/metrics",
    ranks=tuple(RankProcess(rank=rank, local_rank=rank, pid=4800 + rank, log="/l") for rank in (0, 1)),
)
DONE = Outcome(code=0, cause="ok", message="every rank exited with 0")


def with_checkpoint(folder: Path) -> Run:
    """The run, with a checkpoint on this machine."""
    (folder / "step-1.pt").touch()
    return replace(RUN, checkpoint_dir=str(folder))


def ended(run: Run) -> list[str]:
    report = NodeReport(node=0, alive=False, state=NODE, outcome=DONE)
    state = RunStatus(run="night", state="succeeded", message=DONE.message, code=0, outcome=DONE, nodes=(report,))
    closing = formatting.closing_lines(run, state, code=0)
    assert formatting.status_lines(run, state)[2:-2] == closing[1:]
    assert formatting.status_lines(run, state)[-2:] == [
        "  NODE  STATE  RANKS",
        "  0     ended  0 1",
    ]
    return closing[1:]


def test_status_shows_each_nodes_processes_and_metrics(tmp_path: Path) -> None:
    report = NodeReport(node=0, alive=True, state=NODE, outcome=None, progress=Progress(step=3))
    state = RunStatus(run="night", state="training", message="1 of 1 node alive", nodes=(report,))
    nodes = [
        "  NODE  STATE     PID   RANK:PID       METRICS",
        "  0     training  4711  0:4800 1:4801  http://127.0.0.1:9/metrics",
    ]
    logs, checkpoints = "  logs         /runs/night", f"  checkpoints  {tmp_path}"
    assert formatting.status_lines(RUN, state)[3:] == [logs, *nodes]
    assert formatting.status_lines(with_checkpoint(tmp_path), state)[3:] == [logs, checkpoints, *nodes]


def test_a_node_without_a_step_is_running_while_another_starts() -> None:
    """A node that starts again has no process for its ranks yet."""
    reports = [
        NodeReport(node=0, alive=True, state=NODE, outcome=None),
        NodeReport(node=1, alive=True, state=replace(NODE, node=1, state="starting", metrics=None), outcome=None),
    ]
    state = RunStatus(run="night", state="starting", message="2 of 2 nodes alive", nodes=tuple(reports))
    assert formatting.status_lines(RUN, state)[-2:] == [
        "  0     running   4711  0:4800 1:4801  http://127.0.0.1:9/metrics",
        "  1     starting  4711  0 1            -",
    ]


def test_a_command_and_a_target_with_control_characters_move_no_cursor() -> None:
    report = NodeReport(node=0, alive=True, state=None, outcome=None, note="\x1b[2J")
    state = RunStatus(run="night", state="failed", message="\x1b[2Jgone", code=1, nodes=(report,))
    lines = formatting.status_lines(RUN, state)
    assert (lines[0], lines[4]) == ("night  failed, exit code 1: \\x1b[2Jgone", "  0     \\x1b[2J")
    run = replace(RUN, job=replace(RUN.job, command=("\x1b[2J.py",)), target="a\nb")
    for line in (*formatting.runs_table([(run, state)], 0.0), *formatting.status_lines(run, state)):
        assert line.isprintable(), line


def test_status_of_an_ended_run_names_its_checkpoints_only_if_it_can_resume(tmp_path: Path) -> None:
    assert ended(RUN) == ["  logs         /runs/night"]
    assert ended(with_checkpoint(tmp_path)) == ["  logs         /runs/night", f"  checkpoints  {tmp_path}"]


@pytest.mark.parametrize(
    ("state", "code", "resumes"),
    [("failed", 1, True), ("stopped", 143, True), ("failed", 78, False), ("succeeded", 0, False)],
)
def test_a_resume_is_suggested_only_where_it_can_continue_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State, code: int, resumes: bool
) -> None:
    """Settings that were refused are refused again, and a run that has succeeded has nothing left to do."""
    record, ending = with_checkpoint(tmp_path), RunStatus(run="night", state=state, message="", code=code)
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(Path(RUN.folder).parent))
    monkeypatch.setattr(run_store, "load", lambda *_, **__: record)
    monkeypatch.setattr(launcher, "status", lambda *_: (ending,))
    assert any("--resume night" in line for line in formatting.next_steps(record, ending)) == resumes
    assert run_arguments(record) == "night"
    assert run_arguments(replace(record, folder="/else where/night")) == "'/else where/night'", "no name finds it"
    for verb in (runs.suspend, runs.resume):
        with pytest.raises(UsageError) as error:
            verb("night")
        assert_names(error.value, "night", state)
        assert ("--resume night" in str(error.value)) == resumes


def test_a_run_that_resumes_another_has_no_checkpoints_of_its_own(tmp_path: Path) -> None:
    assert list(run_store.create(tmp_path, "night-2", resumes=True).iterdir()) == []
    assert [path.name for path in run_store.create(tmp_path, "night").iterdir()] == ["checkpoints"]


def test_a_run_that_starts_has_all_columns_of_its_nodes() -> None:
    node = replace(NODE, state="starting", metrics=None, ranks=())
    report = NodeReport(node=0, alive=True, state=node, outcome=None)
    state = RunStatus(run="night", state="starting", message="1 of 1 node alive", nodes=(report,))
    assert "  NODE  STATE     PID   RANK:PID  METRICS" in formatting.status_lines(RUN, state)


def test_status_names_the_notices_that_failed_and_those_that_nobody_can_know(tmp_path: Path) -> None:
    sent = Notice(event="restarted", attempt=1, to="$MAIL", state="sent")
    notices = (
        sent,
        replace(sent, to="$CHAT", state="failed", why="HTTP 403"),
        replace(sent, event="hang", state="sending"),
    )
    replace(NODE, notices=notices).write(tmp_path)
    node = read_node((tmp_path / "node.json").read_text())

    def shown(*, alive: bool) -> list[str]:
        report = NodeReport(node=0, alive=alive, state=node, outcome=None)
        state = RunStatus(run="night", state="lost", message="", code=137, nodes=(report,))
        return [line for line in formatting.status_lines(RUN, state) if "notice" in line]

    (line,), (same, unknown) = shown(alive=True), shown(alive=False)
    assert line == same
    assert_names(line, "restarted", "$CHAT", "HTTP 403")
    assert_names(unknown, "hang", "$MAIL", "unknown")


UUID = "GPU-8a2f6c1e-2b7d-4c55-9d0e-0123456789a"
GPUS = (
    GpuReport(uuid=f"{UUID}0", computes=True, run="night-otter", since=1000, busy_percent=97, memory_mib=71680,
              total_mib=81920),
    GpuReport(uuid=f"{UUID}1", computes=True),
    GpuReport(uuid=f"{UUID}2", computes=False, busy_percent=0, memory_mib=4, total_mib=81920),
)  # fmt: skip
HOSTS = (
    HostReport(host="box1", time=8200, load=3.5, cores=64, gpus=GPUS, waiting=("day", "late")),
    HostReport(host="box2", time=1030, cpu_runs=(CpuRun(run="small", node=2, since=1000),)),
    HostReport(host="box3", failure="10.0.0.3:22: no route to host"),
    HostReport(host="box4"),
)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_of_hosts_fits_the_terminal(columns: int, snapshot: Callable[..., None]) -> None:
    lines = [cut(line, columns) for line in hosts_table(HOSTS, {"small": 3})]
    assert max(map(len, lines)) <= columns
    assert any(UUID in line for line in lines) == (columns > 80)
    snapshot("".join(f"{line.rstrip()}\n" for line in lines))


def test_a_machine_that_is_reserved_for_a_spare_is_marked() -> None:
    spare = HostReport(host="box2", time=1030, cpu_runs=(CpuRun(run="small", node=3, since=1000),))
    on_gpu = replace(spare, cpu_runs=(), gpus=(replace(GPUS[0], run="small", node=3),))
    for report in (spare, on_gpu):
        assert "small (spare)" in hosts_table([report], {"small": 3})[1]
        for is_none in ({"small": 4}, {}):  # a node, and a run of another user or machine
            assert "(spare)" not in hosts_table([report], is_none)[1]


def test_control_characters_of_a_program_are_not_shown() -> None:
    assert plain("\x1b[1;31mred\x1b[0m\tx\nstep 1\rstep 2\r\n\x1b]0;title\x07\u202eevil") == (
        "red x\nstep 2\n\\x1b]0;title\\x07\\u202eevil"
    )


def test_a_long_line_is_cut_to_the_columns() -> None:
    assert [cut("a long line", width) for width in (11, 10, 3)] == ["a long line", "a long li…", "a…"]
    assert cut("a long line", 10, plain=True) == "a long..."


def test_a_duration_is_formatted_by_its_length() -> None:
    assert [format_duration(seconds) for seconds in (0.04, 9.94, 31.4, 125, 7451)] == [
        "0.0 s",
        "9.9 s",
        "31 s",
        "2:05",
        "2:04:11",
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_no_escape_sequence_passes_however_it_comes(size: int) -> None:
    text = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\x1bcb\x9b5m\t\r\b\x07ä\n".encode()
    keep = EscapeFilter()
    output = b"".join(keep(text[start : start + size]) for start in range(0, len(text), size))
    assert output == "aredb5m\t\r\bä\n".encode()
