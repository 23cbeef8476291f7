"""The files from which a Prometheus learns where the runs are."""

import json
from dataclasses import replace
from pathlib import Path

from tests.unit.ddpctl.test_monitoring_alerts import ENDED, RUN, TRAINING

from ddpctl.operations import launcher
from ddpwire.run_files import MetricsTarget, is_targets_file_of, targets_file_name, targets_text

LOCAL = replace(RUN, kind="local", handle={})


def test_targets_that_nodes_register_themselves_are_only_removed(tmp_path: Path) -> None:
    launcher.update_discovery(tmp_path, [(LOCAL, TRAINING), (replace(RUN, kind="kubernetes"), TRAINING)])
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / ".targets"
    folder.mkdir()
    names = (
        "night.node-0.json",
        "night.node-11.json",
        "night.task-7.node-0.json",
        "night-2.json",
        "nightmare.json",
        "x.txt",
    )
    for name in names:
        (folder / name).write_text("[]")
    launcher.update_discovery(tmp_path, [(LOCAL, ENDED)])
    assert sorted(path.name for path in folder.iterdir()) == ["night-2.json", "nightmare.json", "x.txt"]


def test_a_targets_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".targets").write_text("in the way")
    launcher.update_discovery(tmp_path, [(RUN, TRAINING), (RUN, ENDED)])


def test_a_targets_file_is_named_after_its_job_and_node() -> None:
    assert targets_file_name("a/b c") == "a_b_c.json"
    assert targets_file_name("night", 3) == "night.node-3.json"
    assert is_targets_file_of("a_b_c.node-3.json", "a/b c")
    assert not is_targets_file_of("night.json.bak", "night")
    target = MetricsTarget(url="http://[fd00::1]:9500/metrics", job_id="n", node=1, launcher="ddprun")
    assert json.loads(targets_text([target]))[0]["targets"] == ["[fd00::1]:9500"]
