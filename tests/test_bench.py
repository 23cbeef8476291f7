"""The benchmarks run, in their smallest form, and say what they found; their numbers are not judged here."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import scaling
import train
from tests import forks

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parents[1] / "bench"


def test_startup(tmp_path):
    found = tmp_path / "startup.json"
    arguments = ["--repeats", "1", "--kills", "1", "--nodes", "2", "--ranks", "1", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "startup.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(found.read_text())
    rows = {name: f"{values[0]:7.2f}" * 3 + "   1" for name, values in result["seconds"].items()}
    assert done.stdout.splitlines()[1:] == [
        "seconds                      median    min    max   n",
        *(f"{name:28}{row}" for name, row in rows.items()),
        f"first step, ddprun / torchrun: {result['ratio']:.2f} (goal: at most 0.45)",
        f"first step, ddprun --exec / torchrun: {result['exec_ratio']:.2f}",
    ]
    assert all(0 < values[0] < 240 for values in result["seconds"].values())


def run(name, tmp_path, *arguments):
    """The lines that a benchmark prints, after its first, and what it writes."""
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *arguments, "--json", str(found)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()[1:], json.loads(found.read_text())


def run_forked(name, tmp_path, *arguments):
    """Do as ``run`` does, with a fork (tests/forks.py)."""
    found = tmp_path / "found.json"
    command = [str(BENCH / f"{name}.py"), *arguments, "--json", str(found)]
    done = forks.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()[1:], json.loads(found.read_text())


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Call a benchmark's main in this process, with forks as its ranks (tests/forks.py). Return what ``run`` does."""
    # Nothing is to be written to stderr, and TORCH_CPP_LOG_LEVEL is only for ranks that are executed.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # no warning where the name of the machine has no address

    def call_main(benchmark, *arguments):
        found = tmp_path / "found.json"
        monkeypatch.setattr(benchmark, "start_python", forks.start)
        monkeypatch.setattr(sys, "argv", [benchmark.__file__, *arguments, "--json", str(found)])
        benchmark.main()
        out, err = capfd.readouterr()  # with that of the ranks
        assert err == ""
        return out.splitlines()[1:], json.loads(found.read_text())

    return call_main


def test_train_and_two_ranks_of_it(call):
    arguments = ["--models", "ConvNet", "--rounds", "1", "--seconds", "0.2"]
    for ranks in ("1", "2"):
        lines, result = call(train, *arguments, "--ranks", ranks, "--ways", "tutorial,ddptrain")
        rates = result["rates"]["ConvNet"]
        assert [line.split()[0] for line in lines] == ["images/s", "ConvNet", "tutorial", "ddptrain", "goal:"]
        assert lines[2].split()[1:] == [f"{rates['tutorial'][0]:.0f}", "1.00", "1.00", "1.00", "1"]
        assert rates["ddptrain"][0] > 0


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_train_with_the_frameworks(framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed: pip install --group bench")
    names = ["accelerate"] if framework == "accelerate" else ["fabric", "lightning"]
    ways = ["tutorial", *names, *(f"{name} bf16" for name in names), "ddptrain"]  # both precisions in one process
    arguments = ["--models", "ConvNet", "--rounds", "1", "--seconds", "0.2", "--ways", ",".join(ways)]
    lines, result = run("train", tmp_path, *arguments)
    assert set(result["rates"]["ConvNet"]) == set(ways)
    assert lines[-2].startswith("  over the best framework in float32 (")
    assert lines[-1].startswith("  over the best framework in their bf16 (")


def test_input(tmp_path):
    lines, result = run_forked("input", tmp_path, "--rounds", "1", "--seconds", "0.05")
    costs = result["microseconds"]
    told = [float(line.split()[-5]) for line in lines[1:-1]]
    assert told == [round(values[0], 2) for values in costs.values()]
    assert lines[-1].startswith("goal: PIL at least 15 times ddptrain: ")


def test_checkpoint(tmp_path):
    lines, result = run_forked("checkpoint", tmp_path, "--rounds", "1")
    assert f"blocked, ddptrain / torch.save: {100 * result['ratio']:.0f} % (goal: at most 25 %)" in lines
    assert min(result["ms"]["ddptrain"]) > 0


def test_deterministic(tmp_path):
    lines, result = run("deterministic", tmp_path, "--rounds", "1", "--models", "deep")
    ways = ["as torch does", "laid out before", "find_unused", "hook, rank order"]
    assert list(result["seconds"]["deep"]) == ways
    assert [line[:28].strip() for line in lines[1:]] == [f"deep, {way}" for way in ways]
    assert all(seconds > 0 for (seconds,) in result["seconds"]["deep"].values())


def test_scaling(call):
    lines, result = call(scaling, "--ranks", "1,2", "--links", "", "--rounds", "1", "--steps", "2")
    assert [line.split()[0] for line in lines] == ["ranks", "1", "2"]
    assert all(values[0] > 0 for values in result["loopback"].values())


def test_notebook(tmp_path):
    found = tmp_path / "found.json"
    arguments = ["--rounds", "1", "--epochs", "1", "--images", "512", "--batch", "64", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "notebook.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"DDPCTL_STATE_DIR": str(tmp_path / "runs"), "PATH": "/usr/bin:/bin"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())["summary"]
    parts = ("workers start", "input", "waiting for the other rank", "not computing", "computing", "epoch")
    assert [line[:28].strip() for line in done.stdout.splitlines()[1:-1]] == ["seconds an epoch", *parts]
    assert result["tutorial"]["workers start"] > result["ours"]["workers start"] == 0
    assert all(result[way]["epoch"] > result[way]["computing"] > 0 for way in result)


def test_recording(tmp_path):
    """The picture shows a launch, a rank that is killed, the run that continues, and its report."""
    picture = tmp_path / "launch.svg"
    arguments = ["--svg", str(picture), "--epochs", "4", "--steps", "400"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "recording.py"), *arguments],
        env=os.environ | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = html.unescape(re.sub("<[^>]*>", "", picture.read_text())).replace("\xa0", " ")
    order = (
        "ddpctl launch --nodes 2",
        "kill -KILL",
        "killed by SIGKILL",
        "training again at",
        "succeeded",
        "night.html",
    )
    places = [shown.find(words) for words in order]
    assert places == sorted(places), shown
    assert min(places) >= 0, shown
    assert "@font-face" not in picture.read_text()


def test_restore():
    done = forks.run([str(BENCH / "restore.py"), "--mib", "8"], env=os.environ, text=True)
    done.check_returncode()
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted((line[0], line[2]) for line in lines) == [
        (how, f"{rank}:") for how in ("pickled", "tensors") for rank in range(4)
    ]
    assert all(float(line[5]) > 0 for line in lines)
