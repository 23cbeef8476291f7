"""The wheel of ddpctl that travels in a notebook, without the folders that serve other machines."""

import base64
import io
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.messages import assert_names

from ddpctl.files.own_wheel import NOT_IN_A_NOTEBOOK, wheel, wheel_text
from ddpwire.exits import Exit


def test_a_verb_that_a_notebooks_wheel_lacks_is_refused_and_the_others_work(tmp_path: Path) -> None:
    assert len(wheel_text()) < 700_000  # Kaggle takes a notebook of 1 MB
    site, whole = (
        zipfile.ZipFile(io.BytesIO(data)) for data in (lzma.decompress(base64.b85decode(wheel_text())), wheel())
    )
    lacking = {*whole.namelist()} - {*site.namelist()}
    assert lacking
    assert all(name.startswith(NOT_IN_A_NOTEBOOK) for name in lacking)
    site.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "DDPCTL_STATE_DIR": str(tmp_path / "state")}
    (tmp_path / "job.sbatch").touch()
    for verb, module, code in (
        (("monitor", "status"), "ddpctl.monitoring", Exit.UNAVAILABLE),
        (("init", "--from", "job.sbatch"), "ddpctl.migration", Exit.UNAVAILABLE),
        (("init",), "", Exit.OK),
    ):
        argv = [sys.executable, "-m", "ddpctl", *verb]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        if module:
            assert_names(done.stderr, module)
            assert len(done.stderr.splitlines()) == 1
