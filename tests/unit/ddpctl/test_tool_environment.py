"""Which variables outside tools get, here and on another machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.unit.ddpctl.answers import OK
from tests.unit.ddpctl.slurm_standins import StandIns

from ddpctl.command import Command, Host, Output, once, remote_line
from ddpctl.environment import ignored_options, is_removed
from ddpctl.execution.executor import Executor
from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.options import SlurmOptions

PATH = os.environ["PATH"]
REMOVED = {
    "SQUEUE_PARTITION": "gpu",
    "SBATCH_WAIT": "1",
    "SACCT_FORMAT": "x",
    "SCANCEL_STATE": "PENDING",
    "SLURM_TIME_FORMAT": "relative",
    "GIT_DIR": "/elsewhere",
    "RSYNC_RSH": "rsh",
    "ANSIBLE_CHECK_MODE_MARKERS": "1",
    "COMPOSE_FILE": "/elsewhere",
    "SSH_ASKPASS": "/bin/false",
    "SRUN_EXPORT_ENV": "NONE",
    "SLURM_STDOUTMODE": "/dev/null",
    "TAR_OPTIONS": "--exclude=*",
}
KEPT = {
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CLUSTERS": "a,b",
    "SLURM_JOB_ID": "7",
    "KUBECONFIG": "/k",
    "DOCKER_HOST": "ssh://box",
    "SSH_AUTH_SOCK": "/agent",
    "ANSIBLE_SSH_ARGS": "-F /config",
    "ANSIBLE_SSH_COMMON_ARGS": "-J gate",
    "ANSIBLE_SSH_CONTROL_PATH_DIR": "/short",
    "ANSIBLE_VAULT_PASSWORD_FILE": "/password",
    "PIP_INDEX_URL": "https://mirror",
    "https_proxy": "proxy:1",
    "LANG": "C",
    "MY_SQUEUE_PARTITION": "mine",
}
ALL = {**REMOVED, **KEPT, "PATH": PATH}


def variables(text: str) -> dict[str, str]:
    pairs = dict(line.partition("=")[::2] for line in text.splitlines())
    return {name: value for name, value in pairs.items() if name in ALL}


def test_a_tool_on_this_machine_gets_where_and_who_but_no_filters_and_options() -> None:
    output = Executor(ALL).perform(once(Command(argv=("sh", "-c", "env"), env={"RSYNC_RSH": "ssh"})))
    assert variables(output.stdout) == {**KEPT, "PATH": PATH, "RSYNC_RSH": "ssh"}, "a command's own variables count"


def test_printenv_reads_the_user_s_own_variables() -> None:
    output = Executor(ALL).perform(once(Command(argv=("printenv", "GIT_DIR"))))
    assert output == Output(returncode=0, stdout="/elsewhere\n")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_tool_on_another_machine_gets_the_same(shell: str) -> None:
    command = Command(argv=("env",), host=Host(address="box"), env={"A": "b c"}, cwd="/")
    done = subprocess.run([shell, "-c", remote_line(command)], env=ALL, capture_output=True, text=True, check=True)
    assert variables(done.stdout) == {**KEPT, "PATH": PATH}
    assert "A=b c" in done.stdout.splitlines()
    assert "PWD=/" in done.stdout.splitlines()


def test_no_shell_stays_between_a_host_and_its_command() -> None:
    command = Command(argv=("sh", "-c", 'kill -0 "$PPID" && echo "$PPID"'), host=Host(address="box"))
    line = ["/bin/sh", "-c", f"exec {remote_line(command)}"]
    done = subprocess.run(line, env=ALL, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(os.getpid()), "a script that watches its parent watches sshd"


def test_the_environment_of_a_node_is_that_of_its_user(tmp_path: Path) -> None:
    executor, path = Executor(ALL), tmp_path / "out"
    output = executor.perform(once(Command(argv=("env",), mode="background", output=str(path))))
    os.waitpid(int(output.stdout), 0)
    assert variables(path.read_text()) == ALL
    assert output.returncode == OK.returncode


def test_a_variable_of_sbatch_that_contradicts_the_file_is_named() -> None:
    listing = "A=SBATCH_QOS=x\nSBATCH_PARTITION=gpu\nSBATCH_ACCOUNT=me\nSBATCH_WAIT=1\nSBATCH_QOS=low\nPATH=/bin\n"
    ignored = ignored_options(listing, ("--partition=gpu", "--qos=high"))
    assert re.findall(r"SBATCH_\w+=\w+", ignored) == ["SBATCH_ACCOUNT=me", "SBATCH_WAIT=1", "SBATCH_QOS=low"]
    assert ignored_options("SBATCH_QOS=high\nPATH=/bin\n", ("--qos=high",)) == ""


def test_the_user_s_own_names_are_not_removed() -> None:
    assert [name for name in ALL if is_removed(name)] == list(REMOVED)


def test_slurm_s_programs_in_a_batch_job_do_not_get_the_user_s_filters(tmp_path: Path) -> None:
    job = JobSpec(name="train", nodes="2", gpus=2, command=("train.py",))
    (tmp_path / "train.py").touch()
    done = StandIns(tmp_path / "site").run(job, SlurmOptions(), SQUEUE_STATES="PENDING", SCANCEL_STATE="PENDING")
    calls = done.of("srun")
    assert calls
    assert [name for call in calls for name in call.env if name.startswith(("SQUEUE_", "SCANCEL_"))] == []
