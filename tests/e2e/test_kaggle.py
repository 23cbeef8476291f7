"""The target kaggle from the command line, against a client that answers as the real one; the wheel that travels."""

import ast
import base64
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tests.unit.ddpctl.kaggle_answers import asked, stand_in
from tests.e2e.driver import ddpctl
from tests.wording import Wording

from ddpctl.own_wheel import wheel
from ddpwire.version import __version__

URL = "https://www.kaggle.com/code/ann/ddpctl-night"
ANSWERS = {
    "config view": "config-view", "kernels push": "push", "kernels status": "status-running", "kernels logs": "logs",
    "kernels output": "output",
}  # fmt: skip


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_folder = stand_in(tmp_path, ANSWERS)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    return tmp_path


def test_a_run_on_kaggle_from_its_launch_to_its_end(client: Path, wording: Wording) -> None:
    runs = client / "runs"
    done = ddpctl(
        "launch", "-t", "kaggle", "--gpus", "2", "--detach", "--name", "night", "--", "--recipe", "mnist-convnet"
    )
    assert (done.returncode, done.stdout) == (0, "night\n"), done.stderr
    assert URL in done.stderr
    wording(done.stderr)
    assert asked(client) == [["config", "view"], ["kernels", "push", "--path", str(runs / "night" / "kaggle")]]
    book = nbformat.read(runs / "night" / "kaggle" / "night.ipynb", as_version=4)
    nbformat.validate(book)
    metadata = json.loads((runs / "night" / "kaggle" / "kernel-metadata.json").read_text())
    assert (metadata["id"], metadata["code_file"], metadata["machine_shape"]) == (
        "ann/ddpctl-night", "night.ipynb", "NvidiaTeslaT4",
    )  # fmt: skip
    assert json.loads(ddpctl("status", "night", "--json").stdout)["state"] == "running"
    wording(ddpctl("status", "night").stdout.splitlines()[0])
    assert ddpctl("logs", "night", "--rank", "1").stdout == "[node0 rank1] hello\n"
    assert ddpctl("logs", "night", "--tail", "2").stdout.splitlines()[0] == "[node0 rank1] hello"
    done = ddpctl("stop", "night")
    assert done.returncode == 69
    wording(done.stderr.splitlines()[-1])
    done = ddpctl("pull", "night")
    assert (done.returncode, done.stdout) == (0, f"{runs}/night/output\n"), done.stderr
    assert asked(client)[-1] == ["kernels", "output", "ann/ddpctl-night", "--path", f"{runs}/night/output", "--force"]
    stand_in(client, ANSWERS | {"kernels status": "status-complete"})
    status = json.loads(ddpctl("status", "night", "--json").stdout)
    assert (status["state"], status["code"]) == ("succeeded", 0)
    wording(ddpctl("status", "night").stdout.splitlines()[0])
    done = ddpctl("launch", "--resume", "night", "--detach")
    assert (done.returncode, done.stdout) == (0, "night-2\n"), done.stderr
    metadata = json.loads((runs / "night-2" / "kaggle" / "kernel-metadata.json").read_text())
    assert metadata["kernel_sources"] == ["ann/ddpctl-night"]


def test_a_refused_push_leaves_no_run(client: Path, wording: Wording) -> None:
    stand_in(client, ANSWERS | {"kernels push": "push-weekly-quota"})
    done = ddpctl("launch", "--target", "kaggle", "--name", "night")
    assert done.returncode == 69
    wording(done.stderr)
    assert not (client / "runs" / "night").exists()
    assert [line[:2] for line in asked(client)] == [["config", "view"], ["kernels", "push"]]


def test_what_cannot_be_on_kaggle_is_refused_before_anything_is_asked(client: Path, wording: Wording) -> None:
    (client / "ddpctl.yaml").write_text(
        "job: {nodes: 2, gpus: 4, secrets: [TOKEN], time_limit: 13h}\ntarget: k\ntargets: {k: {kind: kaggle}}\n"
    )
    done = ddpctl("launch", "-f", str(client / "ddpctl.yaml"), "--", "-m", "mine")
    assert done.returncode == 78
    wording(done.stderr)
    assert asked(client) == []


def test_render_writes_the_notebook_and_its_metadata(client: Path, wording: Wording) -> None:
    (client / "train.py").write_text("print('hello')\n")
    done = ddpctl("render", "-t", "kaggle", "--out", "there", "--name", "mine", "--", "train.py", cwd=client)
    assert (done.returncode, done.stdout) == (0, "there/mine.ipynb\nthere/kernel-metadata.json\n"), done.stderr
    book = nbformat.read(client / "there" / "mine.ipynb", as_version=4)
    nbformat.validate(book)
    sources = [cell.source for cell in book.cells]
    assert "%%writefile train.py\nprint('hello')" in sources
    packed = next(source for source in sources if source.startswith("WHEEL = "))
    assert lzma.decompress(base64.b85decode(ast.literal_eval(packed.removeprefix("WHEEL = ")))) == wheel()
    done = ddpctl("render", "-t", "local", "--out", "there", cwd=client)
    assert done.returncode == 2
    wording(done.stderr)


def test_render_needs_no_client_and_leaves_no_folder_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = ddpctl("render", "-t", "kaggle", "--out", "there", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "there/train.ipynb\nthere/kernel-metadata.json\n"), done.stderr
    assert json.loads((tmp_path / "there" / "kernel-metadata.json").read_text())["id"] == "your-name/ddpctl-train"
    parameters = nbformat.read(tmp_path / "there" / "train.ipynb", as_version=4).cells[-2]
    assert parameters.source == "gpus = 2\nargs = []"
    done = ddpctl("render", "-t", "kaggle", "--out", "empty", "--", "no.py", cwd=tmp_path)
    assert done.returncode == 66
    done = ddpctl("render", "-t", "kaggle", "--out", "train.py", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (73, "")
    wording(done.stderr.splitlines()[-1])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "runs") == ["there", "train.py"]


def test_a_dry_run_is_a_summary(client: Path, wording: Wording) -> None:
    (client / "train.py").write_text("print('hello')\n")
    done = ddpctl("launch", "-t", "kaggle", "--dry-run", "--name", "night", "--", "train.py", cwd=client)
    assert (done.returncode, done.stdout) == (0, f"kaggle kernels push --path {client}/runs/night/kaggle\n")
    wording(re.sub(r"\d+ kB \(", "N kB (", done.stderr.replace(str(client), "FOLDER")))
    assert asked(client) == [["config", "view"]]
    assert not (client / "runs" / "night").exists()


def test_local_runs_have_nothing_to_pull(client: Path, wording: Wording) -> None:
    (client / "ends.py").write_text("")
    ddpctl("launch", "--name", "here", "--", "ends.py", cwd=client)
    done = ddpctl("pull", "here")
    assert done.returncode == 78
    wording(done.stderr)


def test_the_wheel_that_travels_runs_where_the_launchers_libraries_are_not(tmp_path: Path) -> None:
    """As on Kaggle without a network: typer, pydantic, fabric and paramiko may be missing, or old."""
    assert wheel() == wheel()
    assert len(base64.b85encode(lzma.compress(wheel()))) < 600_000  # Kaggle takes a notebook of 1 MB
    file = tmp_path / f"ddpctl-{__version__}-py3-none-any.whl"
    file.write_bytes(wheel())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, str(file)], check=True, timeout=120)
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(('typer', 'pydantic', 'fabric', 'paramiko', 'annotated_doc'))\n"
    )
    code = "from ddpctl.notebook import launch\nprint(launch(lambda x: x + 1, gpus=1, args=(1,), device='cpu'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["2"]), done.stdout + done.stderr
