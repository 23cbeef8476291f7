"""What several places of the repository must have alike: the version, and the packages of the image."""

import re
import tomllib
from pathlib import Path

from ddpwire.version import __version__

ROOT = Path(__file__).parents[3]


def test_the_version_is_the_same_in_all_files() -> None:
    places = ("docker/Dockerfile", "docker/compose.yaml", "examples/own_image/Dockerfile", "docs/environment.md")
    versions = {
        place: set(re.findall(r"(?:ARG VERSION=|ddpctl/ddpctl:)([\w.]+)", (ROOT / place).read_text()))
        for place in places
    }
    assert versions == {place: {__version__} for place in places}


def test_the_lock_has_all_packages_of_pyproject() -> None:
    """Torch aside, which is a build argument."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["agent"], *extras["train"], *extras["digits"]]
    packages = {re.split(r"[><=~\[]", requirement)[0] for requirement in required}
    files = [(ROOT / "docker" / "requirements" / name).read_text() for name in ("torch.txt", "ddpctl.txt")]
    locked = {name for text in files for name in re.findall(r"^([\w-]+)==", text, re.M)}
    assert packages - locked == {"ddpctl", "torch", "torchvision"}
    entries = [entry for text in files for entry in re.split(r"\n(?=[\w-]+==)", text)]
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
