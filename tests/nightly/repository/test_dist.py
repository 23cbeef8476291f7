"""What a release holds: the wheel's files, by name, and what must be said the same in several places."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.unit.repository.test_dist import ROOT

from ddpwire.version import __version__

ROOTS = ("cli", "trainer")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    line = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def sources() -> set[str]:
    """Our modules, as they are imported, and the files that they read."""
    files = [path.relative_to(ROOT / root) for root in ROOTS for path in (ROOT / root).rglob("*") if path.is_file()]
    return {str(path) for path in files if path.suffix in (".py", ".typed", ".yaml", ".json", ".html", ".css")}


def test_the_wheel_holds_the_packages_and_the_playbooks(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"ddpctl-{__version__}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    files = (path.relative_to(ROOT) for path in (ROOT / "ansible").rglob("*") if path.is_file())
    data = {f"ddpctl-{__version__}.data/data/share/ddpctl/{path}" for path in files if "__pycache__" not in path.parts}
    assert names == sources() | about | data
    assert {name.split("/")[0] for name in names - data} == {
        "ddpctl",
        "ddpwire",
        "ddprank",
        "ddprun",
        "ddptrain",
        "ddpcheck",
        info,
    }


def test_the_sdist_holds_what_the_wheel_is_made_of(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
    own = {f"{root}/{path.relative_to(ROOT / root)}" for root in ROOTS for path in (ROOT / root).rglob("*.py")}
    assert names >= own | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"}
    assert [name for name in names if "__pycache__" in name] == []
