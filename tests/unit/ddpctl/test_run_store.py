"""The records of runs, runs that no ddpctl launched, and runs whose files are torn."""

import fcntl
import json
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import ddpctl
from tests.unit.ddpctl.records import run_of

from ddpctl.errors import CannotWriteError, NoInputError, UsageError
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import run_folders
from ddpctl.runs import run_status, run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpwire import locks
from ddpwire.events import Event
from ddpwire.run_files import NodeState, Outcome, RankProcess


def make(root: Path, name: str, created: float) -> Run:
    folder = run_store.create(root, name)
    job = JobSpec(name="digits", nodes="1:2", command=("train.py", "é b"), env={"A": "b"}, port=4000)
    launched = {"uid": "0a1b2c3d4e5f", "user": "ann", "handle": {"port": "4000"}, "options": {"python": ""}}
    run = run_of(name, created=created, job=job, folder=str(folder), **launched)
    run_store.save(run)
    return run


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    old, new = make(tmp_path, "digits-otter", 1.0), make(tmp_path, "digits-oak", 2.0)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/run.json").write_text('{"name": "to')
    assert run_store.load_all(tmp_path) == (new, old)
    assert run_store.load(tmp_path, None) == new
    assert run_store.load(tmp_path, "digits-ot") == old


def test_a_name_that_is_no_run_several_or_taken_and_a_directory_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=str(tmp_path / "no")):
        run_store.load(tmp_path / "no", "x")
    make(tmp_path, "digits-otter", 1.0)
    make(tmp_path, "digits-oak", 2.0)
    with pytest.raises(NoInputError, match=r"'digits-o' .*: digits-oak, digits-otter"):
        run_store.load(tmp_path, "digits-o")
    with pytest.raises(NoInputError, match=r"'x'.* digits-oak, digits-otter"):
        run_store.load(tmp_path, "x")
    with pytest.raises(UsageError, match=r"'digits-oak'.*--resume digits-oak"):
        run_store.create(tmp_path, "digits-oak")
    (tmp_path / "state").write_text("")
    with pytest.raises(CannotWriteError, match=str(tmp_path / "state")):
        run_store.create(tmp_path / "state", "exp")


def test_where_runs_are_kept() -> None:
    assert run_store.state_dir({"DDPCTL_STATE_DIR": "/s"}) == Path("/s")
    assert run_store.state_dir({"XDG_STATE_HOME": "/x", "HOME": "/h"}) == Path("/x/ddpctl/runs")
    assert run_store.state_dir({"HOME": "/h"}) == Path("/h/.local/state/ddpctl/runs")


def test_progress_is_that_of_the_last_rows() -> None:
    head = "time,ddp_last_step,ddp_planned_steps,ddp_epoch,ddp_loss,ddp_checkpoint_last_step\n"
    at = run_status.read_progress(f"{head}1000.0,10,100,1,nan,\n1005.0,20,100,1,0.5,15\n1010.0,30,100,2,nan,25\n")
    assert at == run_status.Progress(step=30, planned=100, epoch=2, loss=None, steps_per_s=2.0, checkpoint_step=25)
    assert at.left_s == 35.0
    lacking = run_status.read_progress(f"{head}1000.0,10,100,1,0.5,15\n1005.0,12,100,1,,\n")  # restarted
    assert lacking is not None
    assert (lacking.step, lacking.loss, lacking.checkpoint_step) == (12, 0.5, 15)
    again = run_status.read_progress(
        f"{head}1000.0,10,100,1,0.5,\n1005.0,20,100,1,0.4,15\n1010.0,16,100,1,,15\n1012.0,20,,,,\n"
    )
    assert again == run_status.Progress(step=20, planned=100, epoch=1, steps_per_s=2.0, checkpoint_step=15)
    assert run_status.read_progress("") is None
    assert run_status.read_progress("time,ddp_last_step\n1000.0,\n") is None
    assert run_status.read_progress("time,ddp_last_step\n1000.0,7\n") == run_status.Progress(step=7)


def test_an_end_that_was_seen_is_known_when_nobody_answers(tmp_path: Path) -> None:
    run = make(tmp_path, "night", 1.0)
    assert run_store.known_end(run) is None
    run_store.note_end(run, RunStatus(run=run.name, state="failed", message="out of memory", code=137))
    end = run_store.known_end(run)
    assert end is not None
    assert (end.state, end.code, end.message) == ("failed", 137, "out of memory")
    node = Path(run.folder) / "node-0"
    node.mkdir()
    Outcome(code=3, cause="error", message="rank 0 exited with 3").write(node)
    own = run_store.known_end(replace(run, job=replace(run.job, nodes="1")))
    assert own is not None
    assert (own.state, own.code) == ("failed", 3)


def test_a_launch_that_was_killed_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path, "night", 1.0)
    folder = Path(run.folder)
    assert run_store.unfinished_launch(run) is None
    with suppress(KeyboardInterrupt), run_store.launching(folder) as note:
        for text in ("waiting for box1: place 2 of 2", "waiting for box2"):
            note(text)
            now = run_store.unfinished_launch(run)
            assert now is not None
            assert (now.pid, now.doing) == (os.getpid(), text)
        note("")
        going = run_store.unfinished_launch(run)
        assert going is not None
        assert (going.going, going.pid) == (True, os.getpid())
        raise KeyboardInterrupt
    remaining = run_store.unfinished_launch(run)
    assert remaining is not None
    assert not remaining.going
    note("of a launch that is over")
    with run_store.launching(folder):
        pass
    assert run_store.unfinished_launch(run) is None


def test_progress_is_what_all_nodes_tell_together() -> None:
    reports = (
        run_status.Progress(step=4, planned=9, loss=1.0, checkpoint_step=2),
        run_status.Progress(step=5, loss=2.0),
    )
    nodes = tuple(
        run_status.NodeReport(node=node, alive=True, state=None, outcome=None, progress=progress)
        for node, progress in enumerate(reports)
    )
    status = run_status.RunStatus(run="night", state="training", message="", nodes=nodes)
    assert status.progress == run_status.Progress(step=5, planned=9, loss=2.0, checkpoint_step=2)
    for step, expected in ((7, 7), (3, 5), (None, 5)):  # the last row of a history may be older than the outcome
        ended = replace(status, outcome=Outcome(code=1, cause="error", message="", step=step))
        assert ended.progress is not None
        assert (ended.progress.step, ended.progress.planned) == (expected, 9)


@pytest.mark.parametrize(
    ("name", "base_name", "next_names"),
    [
        ("resnet-50", "", ["resnet-50-2", "resnet-50-3"]),  # the user's own number
        ("night", "", ["night-2", "night-3"]),
        ("night-2", "night", ["night-3", "night-4"]),  # the number that ddpctl has given
    ],
)
def test_a_resumed_run_counts_on_from_the_number_that_ddpctl_gave(
    tmp_path: Path, name: str, base_name: str, next_names: list[str]
) -> None:
    run = replace(make(tmp_path, name, 0.0), base_name=base_name)
    request = Request(job=run.job, target=run.target, kind=run.kind, options=None, resumes=run)
    for expected in next_names:
        assert run_store.choose_name(tmp_path, request) == (expected, base_name or name)
        (tmp_path / expected).mkdir()


def test_a_launch_waits_for_a_reader_that_holds_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "launch.lock"
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # as ps does for a moment
        leaves = threading.Timer(0.2, fcntl.flock, (reader, fcntl.LOCK_UN))
        leaves.start()
        with run_store.launching(tmp_path):
            leaves.join()
            assert locks.is_locked(path)


def test_a_record_that_is_torn_is_named(tmp_path: Path) -> None:
    make(tmp_path / "runs", "night", 1_790_000_000.0)
    record = Path(make(tmp_path / "runs", "torn", 1.0).folder) / "run.json"
    record.write_text(record.read_text().replace('"created": 1.0', '"created": NaN'))
    assert ddpctl("launch", "--dry-run", "--name", "night").returncode == 2, "the name is taken"
    answer = ddpctl("ps")
    assert answer.returncode == 0
    assert "'torn'" in answer.stderr
    for verb in ("status", "logs", "top", "timeline", "report"):
        done = ddpctl(verb, "torn")
        assert (done.returncode, done.stdout) == (66, "")
        assert str(record) in done.stderr


LOST_RUN = RunStatus(run="a", state="lost", message="", code=137)


def node(folder: Path, number: int = 0, *, ranks: int = 2, started: float = 50.0, host: str = "n0") -> Path:
    """A node's folder, as ddprun leaves it."""
    path = folder / f"node-{number}"
    path.mkdir(parents=True)
    processes = tuple(RankProcess(rank=rank, local_rank=rank, pid=9, log="/l") for rank in range(ranks))
    NodeState(run="a", node=number, pid=9, state="training", started=started, ranks=processes).write(path)
    (path / "environment.json").write_text(json.dumps({"host": host}))
    (path / "events.jsonl").write_text(Event(event="node_started", time=started - 10, node=number).line())
    return path


def runs_in(folder: Path) -> dict[str, Run]:
    return {run.name: run for run in run_folders.load_all(folder)}


def test_a_folder_of_ddprun_is_a_run_and_so_is_each_in_a_folder_of_them(tmp_path: Path) -> None:
    for number in (0, 1):
        node(tmp_path / "a", number)
    node(tmp_path / "b", started=90.0)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a" / "node-99999999").mkdir()
    (tmp_path / "b" / "node-0" / "environment.json").write_text("[" * 99999)
    (tmp_path / "file").touch()
    runs = runs_in(tmp_path)
    assert list(runs) == ["b", "a"], "newest first"
    (alone,) = run_folders.load_all(tmp_path / "a")
    assert alone == runs["a"] == run_folders.load(tmp_path / "a")
    assert (alone.kind, alone.created, alone.folder) == ("local", 40.0, str(tmp_path / "a"))
    assert (alone.job.nodes, alone.job.world_size, alone.checkpoint_dir) == ("2", 4, str(tmp_path / "a/checkpoints"))
    assert run_folders.is_by_hand(alone)


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("a b.py", ("a b.py",)),
        ("-m pkg.mod", ("-m", "pkg.mod")),
        (None, ("unknown",)),
        (7, ("unknown",)),
        ("", ("unknown",)),
    ],
)
def test_the_program_of_a_run_of_ddprun_is_known(tmp_path: Path, script: object, command: tuple[str, ...]) -> None:
    path = node(tmp_path / "a", 1) / "environment.json"
    path.write_text(json.dumps({"host": "n0", "script": script} if script is not None else {"host": "n0"}))
    assert runs_in(tmp_path)["a"].job.command == command


def test_a_folder_that_has_no_run_is_named(tmp_path: Path) -> None:
    for call in (run_folders.load, run_folders.load_all):
        with pytest.raises(NoInputError, match=str(tmp_path / "nowhere")):
            call(tmp_path / "nowhere")
    assert runs_in(tmp_path) == {}


def test_a_node_of_another_machine_is_not_lost_but_unknown(tmp_path: Path) -> None:
    node(tmp_path / "far", host="box7")
    node(tmp_path / "near", host=socket.gethostname())
    runs = runs_in(tmp_path)
    assert run_folders.without_guess(runs["near"], LOST_RUN) == LOST_RUN
    assert run_folders.without_guess(replace(runs["far"], handle={}), LOST_RUN) == LOST_RUN, "a launcher knew better"
    far = run_folders.without_guess(runs["far"], LOST_RUN)
    assert (far.state, far.code) == ("unknown", None)
    assert "box7" in far.message
