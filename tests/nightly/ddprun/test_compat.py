"""Without the private interfaces of CPython: the plain fallbacks."""

from ddprun.system import compat


def test_the_base_of_files_is_that_of_an_open_file(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert issubclass(type(file), compat.file_base())
        monkeypatch.delattr("io._io")
        assert issubclass(type(file), compat.file_base())
