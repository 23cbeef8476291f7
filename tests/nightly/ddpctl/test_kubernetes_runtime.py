"""Further fields of a runtime that contradict a run."""

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl import test_kubernetes_runtime
from tests.unit.ddpctl.kubernetes_lab import JOB
from tests.unit.ddpctl.test_kubernetes_runtime import NAME, submit

from ddpctl.command import Command, Output
from ddpctl.errors import DdpctlError


def test_a_runtime_that_may_not_be_read_is_an_error_that_names_the_right() -> None:
    forbidden = Output(
        returncode=1,
        stderr=f'Error from server (Forbidden): clustertrainingruntimes.trainer.kubeflow.org "{NAME}" is forbidden: '
        'User "ann" cannot get resource "clustertrainingruntimes" in API group "trainer.kubeflow.org" at the cluster '
        "scope\n",
    )
    commands: list[Command] = []
    with pytest.raises(DdpctlError) as error:
        submit({NAME: forbidden}, commands=commands)
    assert not any(command.starts for command in commands)
    assert_names(error.value, NAME, "dry run", 'get resource "clustertrainingruntimes"', "ClusterRole")


@pytest.mark.parametrize(
    ("change", "job", "names"),
    [
        (("spec: {containers", "spec: {hostname: a, containers"), JOB, ["hostname"]),
        (("name: node, image", "name: main, image"), JOB, ["container", "node"]),
        (("spec: {containers", "spec: {volumes: [{name: tmp, hostPath: {path: /a}}], containers"), JOB, ["tmp"]),
    ],
)
def test_a_runtime_that_contradicts_a_run_is_refused_by_its_field(change, job, names):
    test_kubernetes_runtime.test_a_runtime_that_contradicts_a_run_is_refused_by_its_field(change, job, names)
