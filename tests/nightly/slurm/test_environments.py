"""An environment from a lock on a real Slurm cluster, which has no network: uv installs from a wheelhouse.

The wheelhouse has no torch of its own. Its wheel ``torch`` leads to the torch of these tests, which has 1 GB.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import Site, clear
from tests.messages import assert_names

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(900),
]
LOCK = f"torch=={torch.__version__}\nhumanize=={{}}\n"
SCRIPT = """\
import ddpwire
import humanize
from torch import distributed

distributed.init_process_group("gloo")
distributed.barrier()
if distributed.get_rank() == 0:
    print("versions", humanize.__version__, ddpwire.__file__)
distributed.destroy_process_group()
"""
CONFIG = """\
job: {name: digits, nodes: 2, gpus: 1, device: cpu}
target: hpc
targets:
  hpc: {kind: slurm, runtime: none, environment: requirements.txt, wheelhouse: wheels, partition: debug}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_lab.Slurm]:
    with slurm_lab.cluster(2, prefix="ddpslurm") as cluster:
        yield cluster


@pytest.fixture
def site(slurm: slurm_lab.Slurm, tmp_path: Path) -> Iterator[Site]:
    download(tmp_path / "wheels", "humanize==4.9.0", "prometheus-client", "psutil", "nvidia-ml-py")
    download(tmp_path / "wheels", "humanize==4.10.0")
    download(tmp_path / "home/.local/uv", "uv")
    with zipfile.ZipFile(next((tmp_path / "home/.local/uv").iterdir())) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        path = tmp_path / "home/.local/bin/uv"
        path.parent.mkdir()
        path.write_bytes(wheel.read(name))
        path.chmod(0o755)
    about = f"torch-{torch.__version__}.dist-info"
    with zipfile.ZipFile(tmp_path / f"wheels/torch-{torch.__version__}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.pth", f"{Path(torch.__file__).parents[1]}\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {torch.__version__}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/entry_points.txt", distribution("torch").read_text("entry_points.txt") or "")
        wheel.writestr(f"{about}/RECORD", "")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ddpctl.yaml").write_text(CONFIG)
    yield Site(slurm=slurm, folder=tmp_path)
    clear(slurm)


def download(folder: Path, *names: str) -> None:
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
    subprocess.run(argv, check=True, timeout=300)


def launch(site: Site, name: str, version: str) -> str:
    """Launch the script with a version of humanize, and return what it prints."""
    (site.folder / "requirements.txt").write_text(LOCK.format(version))
    path = f"{Path(sys.base_prefix)}/bin:/usr/bin:/bin"  # the lock's torch is for this version of Python
    home = ("env", f"HOME={site.folder}/home", f"PATH={path}", "PYTHONPATH=")
    return site.sh(*home, sys.executable, "-m", "ddpctl", "launch", "--name", name, "--", "train.py")


def test_each_lock_has_its_environment_in_a_folder_that_all_nodes_share(site: Site) -> None:
    folder = site.folder / "state/.environments"
    assert_names(launch(site, "night", "4.9.0"), "versions", "4.9.0")
    (first,) = folder.glob("*/*/ddpctl-environment.json")
    record = json.loads((site.folder / "state/night/run.json").read_text())["handle"]["environment"]
    assert json.loads(first.read_text()) == record
    nodes = [json.loads(path.read_text()) for path in (site.folder / "state/night").glob("node-*/environment.json")]
    assert [node["environment"] for node in nodes] == [f"{record['lock']}, packages {record['packages']}"] * 2
    made = first.stat().st_mtime_ns
    assert_names(launch(site, "day", "4.10.0"), "versions", "4.10.0")
    output = launch(site, "noon", "4.9.0")
    assert_names(output, "versions", "4.9.0", str(first.parent))  # ddprun is not that of these tests either
    assert (len([*folder.glob("*/*/ddpctl-environment.json")]), first.stat().st_mtime_ns) == (2, made)
