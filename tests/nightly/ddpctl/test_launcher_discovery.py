"""The files from which a Prometheus learns where the runs are."""

from pathlib import Path

from tests.unit.ddpctl.test_launcher_discovery import ENDED, TRAINING, run

from ddpctl import launcher


def test_targets_that_nodes_register_themselves_are_only_removed(tmp_path: Path) -> None:
    launcher.update_discovery(
        tmp_path, [(run("night", "local"), TRAINING), (run("night", "kubernetes", logs="x"), TRAINING)]
    )
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
    launcher.update_discovery(tmp_path, [(run("night", "local"), ENDED)])
    assert sorted(path.name for path in folder.iterdir()) == ["night-2.json", "nightmare.json", "x.txt"]


def test_a_targets_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".targets").write_text("in the way")
    launcher.update_discovery(
        tmp_path, [(run("night", "ssh", logs="x"), TRAINING), (run("night", "ssh", logs="x"), ENDED)]
    )
