"""Launch, status, stop and resume with variables of tools set, on this machine, on real sshds and on real Slurm."""

import json
import os
from pathlib import Path

import pytest
from bench.lost_replies import place
from tests.cluster import slurm_lab
from tests.cluster.ssh_lab import ROOT_MISSING
from tests.e2e.driver import wait_until

# In the order of what they do: hide jobs, or change what is printed about them; signal other jobs, or ask; change the
# job; replace a program, a repository, a folder or an option.
TEXT = """
SQUEUE_PARTITION=absent SQUEUE_NAMES=absent SQUEUE_ACCOUNT=absent SQUEUE_QOS=absent SQUEUE_LICENSES=absent
SQUEUE_USERS=nobody SQUEUE_STATES=PENDING SQUEUE_FORMAT=%i SQUEUE_SORT=x SACCT_FORMAT=JobName SINFO_FORMAT=%P
SLURM_TIME_FORMAT=relative SLURM_BITSTR_LEN=1
SCANCEL_STATE=PENDING SCANCEL_NAME=other SCANCEL_PARTITION=absent SCANCEL_USER=nobody SCANCEL_INTERACTIVE=1
SBATCH_PARTITION=absent SBATCH_WAIT=1 SBATCH_TIMELIMIT=1 SBATCH_ARRAY_INX=0-1 SBATCH_ACCOUNT=absent
SBATCH_SIGNAL=KILL@60 SBATCH_JOB_NAME=other SBATCH_OUTPUT=/dev/null SBATCH_EXPORT=NONE SALLOC_PARTITION=absent
SRUN_EXPORT_ENV=NONE SLURM_EXPORT_ENV=NONE SLURM_LABELIO=1 SLURM_STDOUTMODE=/dev/null
RSYNC_RSH=/bin/false RSYNC_PARTIAL_DIR=/absent TAR_OPTIONS=--exclude=* SSH_ASKPASS=/bin/false SSH_ASKPASS_REQUIRE=force
SSH_ORIGINAL_COMMAND=false GIT_DIR=/absent GIT_WORK_TREE=/absent GIT_INDEX_FILE=/absent GIT_LITERAL_PATHSPECS=1
DOCKER_HOST=tcp://absent:1 DOCKER_CONTEXT=absent COMPOSE_FILE=/absent KUBECONFIG=/absent
KUBECTL_EXTERNAL_DIFF=/bin/false ANSIBLE_STDOUT_CALLBACK=absent PIP_TARGET=/absent
"""
VARIABLES = dict(word.split("=", 1) for word in TEXT.split())
KINDS = {"local": None, "ssh": ROOT_MISSING, "slurm": slurm_lab.missing()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_tools_change_no_launch_status_stop_or_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{os.defpath}:/usr/sbin:/sbin")
    if reason := KINDS[kind]:
        pytest.skip(reason)
    with place(kind, tmp_path) as at:

        def state(run: str) -> str:
            code, text = at.ddpctl("status", "--json", run, **VARIABLES)
            assert code in (0, 143), text
            status = json.loads(text[text.index("{") :])
            assert status["state"] not in ("unknown", "lost", "failed"), text
            return str(status["state"])

        assert len(VARIABLES) > 30
        for run, options in (("first", ()), ("second", ("--resume", "first"))):
            code, text = at.ddpctl("launch", "--detach", "--name", run, *options, **VARIABLES)
            assert code == 0, text
            wait_until(lambda run=run: state(run) == "running", f"{kind}: {run} runs")  # type: ignore[misc]
            assert at.alive(run)
            code, text = at.ddpctl("stop", run, **VARIABLES)
            assert (code, at.alive(run)) == (0, []), text
            assert state(run) == "stopped"
