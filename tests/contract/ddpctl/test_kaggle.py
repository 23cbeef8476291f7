"""The target kaggle against a client that answers as the real one has: a run's life, its notebook, what is refused."""

import ast
import base64
import json
import lzma
from collections.abc import Callable

import nbformat
import pytest
from tests.contract.ddpctl.worlds import World
from tests.unit.ddpctl.kaggle_answers import requests, stand_in

from ddpctl.files.own_wheel import NOT_IN_A_NOTEBOOK, wheel

NAME = ("--name", "night")


@pytest.fixture
def site(world: Callable[[str], World]) -> World:
    kaggle = world("kaggle")
    stand_in(kaggle.folder.parent, kaggle.answers | {"kernels status": "status-running"})  # type: ignore[attr-defined]
    return kaggle


def test_a_run_on_kaggle_from_its_launch_to_its_end(site: World) -> None:
    runs, calls = site.runs, site.folder.parent
    done = site.ddpctl("launch", "--detach", *NAME, "--", "--recipe", "mnist-convnet")
    assert (done.returncode, done.stdout) == (0, "night\n"), done.stderr
    assert "https://www.kaggle.com/code/ann/ddpctl-night" in done.stderr
    assert requests(calls) == [["config", "view"], ["kernels", "push", "--path", str(runs / "night/kaggle")]]
    nbformat.validate(nbformat.read(runs / "night/kaggle/night.ipynb", as_version=4))
    metadata = json.loads((runs / "night/kaggle/kernel-metadata.json").read_text())
    assert (metadata["id"], metadata["code_file"]) == ("ann/ddpctl-night", "night.ipynb")
    assert site.ddpctl("logs", "night", "--rank", "1").stdout == "[node0 rank1] hello\n"
    assert site.ddpctl("pull", "night").stdout == f"{runs}/night/output\n"
    assert requests(calls)[-1] == ["kernels", "output", "ann/ddpctl-night", "--path", f"{runs}/night/output", "--force"]
    site.enter("succeeded")
    status = site.json("status", "night")
    assert (status["state"], status["code"]) == ("succeeded", 0)
    assert site.ddpctl("launch", "--resume", "night", "--detach").stdout == "night-2\n"
    metadata = json.loads((runs / "night-2/kaggle/kernel-metadata.json").read_text())
    assert metadata["kernel_sources"] == ["ann/ddpctl-night"]


def test_a_refused_push_leaves_no_run(site: World) -> None:
    stand_in(site.folder.parent, {"config view": "config-view", "kernels push": "push-weekly-quota"})
    done = site.ddpctl("launch", *NAME)
    assert (done.returncode, (site.runs / "night").exists()) == (69, False)


def test_what_cannot_be_on_kaggle_is_refused_before_the_client_is_called(site: World) -> None:
    job = {"nodes": 2, "gpus": 4, "secrets": ["TOKEN"], "time_limit": "13h"}
    text = json.dumps({"job": job, "target": "there", "targets": {"there": {"kind": "kaggle"}}})
    (site.folder / "ddpctl.yaml").write_text(text)
    done = site.ddpctl("launch", "--", "-m", "mine")
    assert (done.returncode, requests(site.folder.parent)) == (78, [])
    for key in ("nodes", "gpus", "secrets", "time_limit"):
        assert key in done.stderr


def test_render_writes_the_notebook_without_a_client(site: World) -> None:
    (site.bin / "kaggle").unlink()
    (site.folder / "train.py").write_text("print('hello')\n")
    done = site.ddpctl("render", "--out", "out", "--name", "mine", "--", "train.py")
    assert (done.returncode, done.stdout) == (0, "out/mine.ipynb\nout/kernel-metadata.json\n"), done.stderr
    assert json.loads((site.folder / "out/kernel-metadata.json").read_text())["id"] == "your-name/ddpctl-mine"
    book = nbformat.read(site.folder / "out/mine.ipynb", as_version=4)
    nbformat.validate(book)
    sources = [cell.source for cell in book.cells]
    assert "%%writefile train.py\nprint('hello')" in sources
    assert book.cells[-2].source == "gpus = 2\nargs = []"
    packed = next(source for source in sources if source.startswith("WHEEL = "))
    text = ast.literal_eval(packed.removeprefix("WHEEL = "))
    assert lzma.decompress(base64.b85decode(text)) == wheel(without=NOT_IN_A_NOTEBOOK)
    assert len(text) < 700_000  # Kaggle takes a notebook of 1 MB
    before = sorted(path.name for path in site.folder.iterdir())
    for arguments, code in (("empty", "no.py"), 66), (("train.py", "train.py"), 73):
        assert site.ddpctl("render", "--out", arguments[0], "--", arguments[1]).returncode == code
    assert sorted(path.name for path in site.folder.iterdir()) == before
