"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

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
    assert [(one.cause, one.retry) for one in outcomes] == [("gave_up", False)] * 2
