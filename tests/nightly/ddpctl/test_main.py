"""ddpctl's help, start-up time, versions and init."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.in_process import ddpctl as in_process
from tests.unit.ddpctl.test_main import DDPCTL

from ddpctl.main import main


@pytest.mark.parametrize(
    ("option", "instead"),
    [("--nproc-per-node", "--gpus"), ("--nproc_per_node=2", "--gpus"), ("--nnodes", "--nodes"),
     ("--master_port", "--port"), ("--rdzv-id", "leave"), ("--standalone", "leave"),
     ("--lr", " -- "), ("-m", " -- ")],
)  # fmt: skip
def test_an_option_that_launch_does_not_have(
    option: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddpctl", "launch", option, "2", "--", "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert instead in output.err.partition("--help. ")[2]


def test_init_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ddpctl.yaml")
    assert in_process("init", "--force", cwd=tmp_path).returncode == 73


def test_completion_knows_the_shells() -> None:
    variables = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [*DDPCTL, "--show-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "complete -o default -F _ddpctl_completion ddpctl"
