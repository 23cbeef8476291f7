"""Which variables outside tools of this machine get."""

import os
from pathlib import Path

from ddpctl.command import Command, Output, once
from ddpctl.environment import is_removed
from ddpctl.execution.executor import Executor

PATH = os.environ["PATH"]
REMOVED = {
    "SQUEUE_PARTITION": "gpu",
    "SQUEUE_FORMAT": "%i",
    "SACCT_FORMAT": "JobName",
    "SCANCEL_STATE": "PENDING",
    "SLURM_TIME_FORMAT": "relative",
    "GIT_DIR": "/elsewhere",
}
KEPT = {
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CLUSTERS": "a,b",
    "SLURM_JOB_ID": "7",
    "SBATCH_ACCOUNT": "me",
    "KUBECONFIG": "/k",
    "DOCKER_HOST": "ssh://box",
    "LANG": "C",
    "MY_SQUEUE_PARTITION": "mine",
}
ALL = {**REMOVED, **KEPT, "PATH": PATH}


def variables(text: str) -> dict[str, str]:
    pairs = dict(line.partition("=")[::2] for line in text.splitlines())
    return {name: value for name, value in pairs.items() if name in ALL}


def test_a_tool_gets_no_filter_or_format_that_its_user_has_set() -> None:
    output = Executor(ALL).perform(once(Command(argv=("sh", "-c", "env"), env={"GIT_DIR": "/own"})))
    assert variables(output.stdout) == {**KEPT, "PATH": PATH, "GIT_DIR": "/own"}, "a command's own variables count"


def test_printenv_reads_the_user_s_own_variables() -> None:
    output = Executor(ALL).perform(once(Command(argv=("printenv", "SQUEUE_FORMAT"))))
    assert output == Output(returncode=0, stdout="%i\n")


def test_a_node_has_the_variables_of_its_user(tmp_path: Path) -> None:
    path = tmp_path / "out"
    output = Executor(ALL).perform(once(Command(argv=("env",), mode="background", output=str(path))))
    os.waitpid(int(output.stdout), 0)
    assert variables(path.read_text()) == ALL


def test_only_the_listed_names_are_removed() -> None:
    assert [name for name in ALL if is_removed(name)] == list(REMOVED)
