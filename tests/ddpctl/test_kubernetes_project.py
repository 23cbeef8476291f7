"""Which files of a project go along: the reader, run as the target runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpctl.targets.kubernetes.options import DEFAULT_PROJECT
from ddpctl.targets.kubernetes.project import MOST_BYTES


def read(folder: Path, *globs: str, listed: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.project", *(globs or DEFAULT_PROJECT)]
    return subprocess.run(argv, cwd=folder, input=listed, capture_output=True, text=True, timeout=60)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "import lib.model\n",
        "lib/model.py": "x = 'é'\n",
        "conf/big.yaml": "a: 1\n",
        "README.md": "no",
        ".git/config.py": "no",
        "__pycache__/train.py": "no",
        "env/pyvenv.cfg": "no",
        "env/lib/site.py": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_it_finds_by_itself(project: Path) -> None:
    done = read(project)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "conf/big.yaml": "a: 1\n",
        "lib/model.py": "x = 'é'\n",
        "train.py": "import lib.model\n",
    }


def test_what_git_lists_and_what_is_asked_for(project: Path) -> None:
    done = read(project, "lib/*.py", listed="train.py\0lib/model.py\0gone/lib.py\0")
    assert json.loads(done.stdout) == {"lib/model.py": "x = 'é'\n"}


def test_what_does_not_fit_or_is_no_text(project: Path) -> None:
    (project / "a.txt").write_bytes(b"\xff")
    done = read(project)
    assert (done.returncode, done.stderr) == (
        78,
        "a.txt is no text in UTF-8: leave it out of the target's 'project'\n",
    )
    (project / "a.txt").write_bytes(b"x" * (MOST_BYTES + 1))
    done = read(project)
    assert (done.returncode, done.stderr) == (
        78,
        "the project's files are more than 900 KiB or 500 files at a.txt: say with the target's 'project' which are "
        "needed, or put them into an image (project: [])\n",
    )
