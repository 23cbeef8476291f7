"""Without the private interfaces of CPython and prometheus_client: the plain fallbacks."""

import subprocess
import sys
from pathlib import Path

from ddprun.metrics import metrics
from ddprun.system import compat


def test_without_the_format_of_its_files_they_stay_apart_and_are_added_up(monkeypatch, tmp_path):
    write = (
        "import sys; from prometheus_client import Counter; "
        "Counter('steps', 'done', ['kind']).labels('a').inc(int(sys.argv[1]))"
    )
    for number in (2, 3):
        environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", write, str(number)], env=environ, check=True, timeout=60)
    before = sorted(path.name for path in tmp_path.glob("counter_*.db"))
    assert len(before) == 2
    with monkeypatch.context() as patch:
        patch.delattr("prometheus_client.mmap_dict.mmap_key")
        metrics.merge_rank_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert steps(tmp_path) == 5
    metrics.merge_rank_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["counter_0.db"]
    assert steps(tmp_path) == 5


def steps(folder: Path) -> float:
    (family,) = metrics.read_rank(folder)
    return next(sample.value for sample in family.samples if sample.name == "steps_total")


def test_the_base_of_files_is_that_of_an_open_file(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert issubclass(type(file), compat.file_base())
        monkeypatch.delattr("io._io")
        assert issubclass(type(file), compat.file_base())
