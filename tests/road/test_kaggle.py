"""The target kaggle from the command line, against a client that answers as the real one; the wheel that travels."""

import ast
import base64
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tests.ddpctl.kaggle_answers import asked, stand_in
from tests.road.driver import ddpctl

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


def test_a_run_on_kaggle_from_its_launch_to_its_end(client: Path) -> None:
    runs = client / "runs"
    done = ddpctl(
        "launch", "-t", "kaggle", "--gpus", "2", "--detach", "--name", "night", "--", "--recipe", "mnist-convnet"
    )
    assert (done.returncode, done.stdout) == (0, "night\n"), done.stderr
    assert done.stderr == (
        "run night: 1 node x 2 ranks of ddptrain on kaggle (--target)\n"
        "  version 1 of ann/ddpctl-night\n"
        f"  logs         {URL}\n"
        "  detached     ddpctl logs -f night, ddpctl status night, ddpctl stop night\n"
    )
    assert asked(client) == [["config", "view"], ["kernels", "push", "--path", str(runs / "night" / "kaggle")]]
    book = nbformat.read(runs / "night" / "kaggle" / "night.ipynb", as_version=4)
    nbformat.validate(book)
    metadata = json.loads((runs / "night" / "kaggle" / "kernel-metadata.json").read_text())
    assert (metadata["id"], metadata["code_file"], metadata["machine_shape"]) == (
        "ann/ddpctl-night", "night.ipynb", "NvidiaTeslaT4",
    )  # fmt: skip
    done = ddpctl("status", "night")
    assert done.stdout.splitlines()[0] == "night  training: its session runs"
    assert ddpctl("logs", "night", "--rank", "1").stdout == "[node0 rank1] hello\n"
    assert ddpctl("logs", "night", "--tail", "2").stdout.splitlines()[0] == "[node0 rank1] hello"
    done = ddpctl("stop", "night")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        69,
        f"ddpctl: night: it goes on: the kaggle client cannot stop a session. Cancel is on {URL}; kaggle kernels "
        "delete ann/ddpctl-night removes the notebook with all that it has written",
    )
    done = ddpctl("pull", "night")
    assert (done.returncode, done.stdout) == (0, f"{runs}/night/output\n"), done.stderr
    assert asked(client)[-1] == ["kernels", "output", "ann/ddpctl-night", "--path", f"{runs}/night/output", "--force"]
    stand_in(client, ANSWERS | {"kernels status": "status-complete"})
    assert ddpctl("status", "night").stdout.splitlines()[0] == (
        "night  succeeded, exit code 0: every rank exited with 0"
    )
    done = ddpctl("launch", "--resume", "night", "--detach")
    assert (done.returncode, done.stdout) == (0, "night-2\n"), done.stderr
    metadata = json.loads((runs / "night-2" / "kaggle" / "kernel-metadata.json").read_text())
    assert metadata["kernel_sources"] == ["ann/ddpctl-night"]


def test_a_refused_push_leaves_no_run(client: Path) -> None:
    stand_in(client, ANSWERS | {"kernels push": "push-weekly-quota"})
    done = ddpctl("launch", "--target", "kaggle", "--name", "night")
    assert (done.returncode, done.stderr) == (
        69,
        "ddpctl: cannot push ann/ddpctl-night: this week's GPU hours are used up: kaggle quota says when they come "
        "back; --device cpu needs none\n",
    )
    assert not (client / "runs" / "night").exists()
    assert [line[:2] for line in asked(client)] == [["config", "view"], ["kernels", "push"]]


def test_what_cannot_be_on_kaggle_is_refused_before_anything_is_asked(client: Path) -> None:
    (client / "ddpctl.yaml").write_text(
        "job: {nodes: 2, gpus: 4, secrets: [TOKEN], time_limit: 13h}\ntarget: k\ntargets: {k: {kind: kaggle}}\n"
    )
    done = ddpctl("launch", "-f", str(client / "ddpctl.yaml"), "--", "-m", "mine")
    assert done.returncode == 78
    assert done.stderr.replace(str(client), "") == (
        "/ddpctl.yaml:1:14: nodes: a Kaggle session is one node, not 2\n"
        "/ddpctl.yaml:1:23: gpus: a session with NvidiaTeslaT4 has 2 GPUs, not 4\n"
        "/ddpctl.yaml:1:35: secrets: a secret would stand in the notebook: keep it in Kaggle's own Add-ons > Secrets, "
        "and read it there\n"
        "/ddpctl.yaml:1:56: time_limit: a Kaggle session is 12h at most, not 13h\n"
        "--command: -m mine: a script and `files` of the target travel to Kaggle, a module does not\n"
    )
    assert asked(client) == []


def test_render_writes_the_notebook_and_its_metadata(client: Path) -> None:
    (client / "train.py").write_text("print('hello')\n")
    done = ddpctl("render", "-t", "kaggle", "--out", "there", "--name", "mine", "--", "train.py", cwd=client)
    assert (done.returncode, done.stdout) == (0, "there/mine.ipynb\nthere/kernel-metadata.json\n"), done.stderr
    book = nbformat.read(client / "there" / "mine.ipynb", as_version=4)
    nbformat.validate(book)
    sources = [cell.source for cell in book.cells]
    assert "%%writefile train.py\nprint('hello')" in sources
    packed = next(source for source in sources if source.startswith("WHEEL = "))
    assert lzma.decompress(base64.b64decode(ast.literal_eval(packed.removeprefix("WHEEL = ")))) == wheel()
    done = ddpctl("render", "-t", "local", "--out", "there", cwd=client)
    assert (done.returncode, done.stderr) == (
        2, "ddpctl: --out: a target of kind local has one file: ddpctl render > FILE\n"
    )  # fmt: skip


def test_local_runs_have_nothing_to_pull(client: Path) -> None:
    (client / "ends.py").write_text("")
    ddpctl("launch", "--name", "here", "--", "ends.py", cwd=client)
    done = ddpctl("pull", "here")
    assert (done.returncode, done.stderr) == (
        78, f"ddpctl: here: there is nothing to pull from a target of kind local: it is in {client}/runs/here\n"
    )  # fmt: skip


def test_the_wheel_that_travels_runs_where_the_launchers_libraries_are_not(tmp_path: Path) -> None:
    """As on Kaggle without a network: typer, pydantic, fabric and paramiko may be missing, or old."""
    assert wheel() == wheel()
    assert len(base64.b64encode(lzma.compress(wheel()))) < 600_000  # Kaggle takes a notebook of 1 MB
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
