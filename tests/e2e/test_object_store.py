"""Checkpoints in a real S3 server: killed in the middle of an upload, resumed on an empty machine, pulled."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import SCRIPTS, ddpctl, events_of, wait_until

from ddprank.object_store import ObjectStore

ABSENT = [name for name in ("s3fs", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
CANARY = "canary-of-a-secret-key"
TRAIN = ("--epochs", "3", "--deterministic", "--device", "cpu")


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the server makes when it holds back an answer."""
    held = tmp_path / "held"
    server = subprocess.Popen([sys.executable, SCRIPTS / "s3_server.py", held], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for name, value in {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "someone", "SECRET_ACCESS_KEY": CANARY,
                            "DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=60).close()  # noqa: S310
        yield held
    finally:
        server.kill()
        server.communicate()


def train(folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return forks.start(["-m", "ddptrain", *TRAIN, *options], cwd=folder, env=os.environ, text=True, **pipes)


def fingerprint(output: str) -> str:
    return re.findall(r"weights sha256 ([0-9a-f]{16})", output)[-1]


def objects(prefix: str) -> set[str]:
    with urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/bucket?prefix={prefix}", timeout=60) as answer:  # noqa: S310
        return set(re.findall(rf"<Key>{prefix}([^<]+)</Key>", answer.read().decode()))


def steps(url: str) -> list[int]:
    return [checkpoint["step"] for checkpoint in ObjectStore(url).checkpoints()]


@pytest.mark.timeout(600)  # three trainings and three pulls
@pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (make installs the group dev)")
def test_a_run_goes_on_from_the_store_on_an_empty_machine(tmp_path: Path, held: Path) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed").communicate(timeout=300)

    # Killed while the data of step 90 is in the store, and the index does not list it.
    wanted = held.with_name("held.wanted")
    wanted.write_text('"step": 90')
    first = train(tmp_path / "first", "--checkpoint-dir", "s3://bucket/all/night")
    wait_until(held.exists, "the upload of step 90", timeout_s=300)
    first.kill()
    first.communicate()
    wanted.unlink()
    assert "step-00000090/step-00000090.json" in objects("all/night/")
    assert steps("s3://bucket/all/night") == [45]

    (tmp_path / "ddpctl.yaml").write_text(
        "job:\n  device: cpu\n  checkpoint_dir: s3://bucket/all\n"
        "  secrets: [AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]\n"
    )
    done = ddpctl("launch", "--name", "night", "--", *TRAIN, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert fingerprint(done.stdout + done.stderr) == fingerprint(undisturbed)
    assert [event.step for event in events_of(tmp_path, "night", "checkpoint_loaded")] == [45]
    assert steps("s3://bucket/all/night") == [135, 90, 45]
    record = json.loads((tmp_path / "runs/night/run.json").read_text())
    assert record["job"]["checkpoint_dir"] == "s3://bucket/all/night"

    # What is in the store is what was saved, and no file of the run has the secret.
    run = tmp_path / "runs/night"
    saved = {path.name: path.read_bytes() for path in (run / "checkpoints").glob("step-*")}
    for file in run.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file
    shutil.rmtree(run / "checkpoints")
    for _ in range(2):  # the second time, all is here
        pulled = ddpctl("pull", "night", timeout=300)
        assert pulled.returncode == 0, pulled.stderr
        assert {path.name: path.read_bytes() for path in (run / "output/checkpoints").iterdir()} == saved
    best = ddpctl("pull", "night", "--best", "--into", str(tmp_path / "best"), timeout=300)
    assert best.returncode == 0, best.stderr
    assert len(list((tmp_path / "best/checkpoints").glob("*.pt"))) == 1


def test_without_the_extra_the_message_names_its_package(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without/fsspec.py").write_text("raise ImportError('no fsspec here')")
    path = os.pathsep.join((str(tmp_path / "without"), os.environ["PYTHONPATH"]))
    argv = (sys.executable, "-m", "ddprank.object_store", "s3://bucket/night", str(tmp_path / "into"))
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "pip install s3fs" in done.stderr) == (78, True), done.stderr
