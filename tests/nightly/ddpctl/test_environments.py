"""Further locks and targets that are refused."""

import pytest
from tests.unit.ddpctl import test_environments
from tests.unit.ddpctl.test_environments import BARE, UV_LOCK


@pytest.mark.parametrize(
    ("kind", "name", "text", "more", "place", "facts"),
    [
        pytest.param(
            "slurm", "requirements.txt", "torch==2.10.0", "    runtime: pyxis\n", "4:18", ("pyxis",), id="pyxis"
        ),
        pytest.param("ssh", "requirements.txt", "torch==2\xff", BARE, "4:18", ("requirements.txt",), id="not-utf-8"),
        pytest.param("ssh", "uv.lock", UV_LOCK, BARE, "4:18", ("pyproject.toml",), id="no-pyproject"),
        pytest.param("ssh", "conda.yaml", "torch", BARE, "4:18", ("uv.lock",), id="another-name"),
        pytest.param(
            "ssh", "requirements.txt", "torch==2", f"{BARE}    wheelhouse: .\n", "4:18", ("wheels",), id="no-wheels"
        ),
        pytest.param("kaggle", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="kaggle"),
        pytest.param("local", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="local"),
        pytest.param(
            "ssh", "requirements.txt", "torch==2.10.0\nnumpy\n", BARE, "4:18", ("'numpy'", "version"), id="no-version"
        ),
        pytest.param(
            "ssh",
            "requirements.txt",
            "torch==2",
            f"{BARE}    python: ~/venv/bin/python\n",
            "7:13",
            ("python",),
            id="python",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_at_its_key(
    kind, name, text, more, place, facts, tmp_path, monkeypatch
):
    test_environments.test_an_environment_that_cannot_be_made_is_an_error_at_its_key(
        kind, name, text, more, place, facts, tmp_path, monkeypatch
    )
