"""At which step a rehearsal disturbs a script, and how it reads the facts of a rank that was killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.messages import assert_names

from ddprun.ranks import cpu_devices
from ddprun.rehearsal import OF_A_RUN, middle_step, new_files, project_files, read_facts


def run(steps: int, *saves: int) -> dict[str, Any]:
    """The undisturbed run of a script that saves after these steps."""
    rank = {"step": [{}] * steps, "save": [{"step": step, "error": ""} for step in saves]}
    return {"processes": [{"step": [], "save": []}, rank]}  # the first one starts the ranks


@pytest.mark.parametrize(
    ("steps", "saves", "step"),
    [
        (60, (), 36),
        (60, (20, 40, 60), 30),  # between two saves, and nearest to 60 %
        (60, (10, 20, 30, 40, 50, 60), 35),
        (60, (60,), 36),  # saved at the end only
        (60, (30,), 45),
        (6, (1, 2, 3, 4, 5, 6), 3),  # saved after each step
        (1, (), 1),
    ],
)
def test_a_script_is_disturbed_between_two_saves(steps: int, saves: tuple[int, ...], step: int) -> None:
    assert middle_step(run(steps, *saves)) == step


def test_the_last_fact_of_a_killed_rank_may_be_torn_and_one_without_a_fact_is_left_out(tmp_path: Path) -> None:
    facts = '{"start": 3, "time": 1.0, "pid": 7}\n{"group": 1, "time": 2.0}\n{"step": 1, "ti'
    for name, text in (("3.7", facts), ("0.7", ""), ("go", "")):
        (tmp_path / name).write_text(text)
    (rank,) = read_facts(tmp_path)
    assert (rank["rank"], len(rank["start"]), rank["step"]) == (1, 1, [])


def test_a_temporary_file_that_existed_before_is_not_removed() -> None:
    def opened(path: str, time: float, *, existed: bool) -> dict[str, Any]:
        return {"file": path, "time": time, "existed": existed}

    first = {"file": [opened("/tmp/old", 1.0, existed=True), opened("/tmp/new", 3.0, existed=True)]}
    second = {"file": [opened("/tmp/new", 2.0, existed=False), opened("/data/new", 2.0, existed=False)]}
    assert new_files([first, second]) == {Path("/tmp/new")}


HANDLERS = """
import functools, signal, sys
from types import SimpleNamespace
from ddprun.ranks.observer import Observer

class StopError(Exception):
    pass

def stop(*_):
    raise StopError

handler = {"function": stop, "partial": functools.partial(stop, 1), "lambda": lambda _, frame: stop(frame)}[sys.argv[1]]
signal.signal(signal.SIGUSR1, handler)
observer, passed = Observer.__new__(Observer), 0
observer._write_once = lambda _, text: print("recorded", text)
loss = SimpleNamespace(numel=lambda: 1, detach=lambda: signal.raise_signal(signal.SIGUSR1))
for observed in (
    observer._guard(lambda: signal.raise_signal(signal.SIGUSR1)), lambda: observer._backward(lambda _: None, loss)
):
    try:
        observed()
    except StopError:
        passed += 1
observer._guard(lambda: [][0])()
print("passed", passed)
"""


@pytest.mark.parametrize("handler", ["function", "partial", "lambda"])
def test_an_exception_of_the_scripts_signal_handler_is_the_scripts(handler: str) -> None:
    """In a process of its own, because a signal must not end the tests' process."""
    done = subprocess.run([sys.executable, "-c", HANDLERS, handler], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    recorded, passed = done.stdout.splitlines()
    assert recorded.startswith("recorded <lambda>: IndexError")
    assert passed == "passed 2"


def plan_of(**values: Any) -> dict[str, Any]:
    return {"list": "", "links": [], "max_bytes": 100, "command": ["train.py"], **values}


def test_each_node_gets_the_files_that_are_sent_and_no_linked_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.py", "conf/.hidden", "data/large"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(40))
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    assert sorted(project_files(plan_of(links=["data"]))) == ["conf/.hidden", "link", "train.py"]
    with pytest.raises(ValueError, match="--link"):
        project_files(plan_of())
    text = json.dumps({"files": {"train.py": ""}, "left_out": ["models (ignored)"]})
    assert project_files(plan_of(list=f"print({text!r})")) == ["train.py"]
    assert_names(capsys.readouterr().err, "models (ignored)", "--link")
    for plan in (plan_of(links=["images"]), plan_of(command=["test.py"])):
        with pytest.raises(FileNotFoundError):
            project_files(plan)


def test_a_nested_ddprun_gets_no_variable_of_the_run_around_it() -> None:
    own = ("DDP_RUN_DIR", "PET_NNODES", "RANK", "LOCAL_RANK", "MASTER_ADDR", "SLURM_JOB_ID", "OMP_NUM_THREADS")
    own += ("DDP_EVENTS_FILE", "DDP_HEARTBEAT_FILE", "GROUP_WORLD_SIZE", "ROLE_NAME", "PROMETHEUS_MULTIPROC_DIR")
    others = ("PATH", "HOME", "RANKING", "DATA_RANK", "HF_TOKEN", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES")
    others += ("LOCAL_TOKEN", "MASTER_KEY", "DDP_TOKEN", "GROUP_NAME", "ROLE_ARN")
    assert [*filter(OF_A_RUN.match, (*own, *others))] == [*own]


def test_a_device_of_a_rehearsal_on_cpus_stays_the_gpu_that_the_script_names() -> None:
    with cpu_devices._mode(torch):
        device = torch.device("cuda", 1)
        assert (str(device), str(torch.zeros(1, device=device).device)) == ("cuda:1", "cpu")
