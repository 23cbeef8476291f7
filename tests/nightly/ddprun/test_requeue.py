"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

import errno

from tests.unit.ddprun.test_restart_policy import SAVED, limited, requeues_of

from ddpwire.run_files import read_outcome


def test_both_nodes_give_up_after_three_starts_of_a_slurm_job(runs, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    codes = []
    for number in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        nodes = runs.pair("act.py", "1=-9", options=("--max-restarts", "0", "--run-id", "night"))
        codes.append([node.end() for node in nodes])
    assert codes == [[137, 137], [137, 137], [75, 75]]
    outcomes = [read_outcome((node.folder / "outcome.json").read_text()) for node in nodes]
    assert [(outcome.cause, outcome.retry) for outcome in outcomes] == [("gave_up", False)] * 2


def test_a_folder_that_cannot_be_listed_is_no_reason_to_give_up(tmp_path, monkeypatch):
    starts = [requeues_of(tmp_path) for _ in range(3)]

    def fails(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("ddprun.files.node_dir.newest_checkpoint", fails)
    assert limited(starts[-1], SAVED) == SAVED
    assert limited(requeues_of(tmp_path), SAVED) == SAVED
