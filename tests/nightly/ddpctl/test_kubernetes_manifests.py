"""All pairs of the jobs and options of tests/unit/ddpctl/test_kubernetes_manifests.py give valid manifests."""

import pytest
from tests.unit.ddpctl.kubernetes_judges import faults
from tests.unit.ddpctl.kubernetes_lab import draft_of
from tests.unit.ddpctl.test_kubernetes_manifests import cases, check_pod_security, check_schemas

from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions

CASES = cases(all_pairs=True)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_the_schemas_accept_every_object(job: JobSpec, options: KubernetesOptions) -> None:
    assert len(CASES) > 150
    check_schemas(job, options)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_pod_security_restricted_admits_every_pod(job: JobSpec, options: KubernetesOptions) -> None:
    check_pod_security(job, options)


def test_a_planted_fault_in_a_job_is_found() -> None:
    draft = draft_of()
    job = WORKLOADS["pytorchjob"].job(draft)
    job["spec"]["nprocPerNode"] = 2
    assert [line.partition(": ")[2] for line in faults(job)] == ["spec.nprocPerNode: 2 is not of type 'string'"] * 3
    job["spec"]["nprocPerNode"] = "2"
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["rezources"] = {}
    assert ["rezources" in line for line in faults(job)] == [True, True, True]
    train = WORKLOADS["trainjob"].job(draft)
    train["spec"]["trainer"]["numProcPerNode"] = "auto"
    assert len(faults(train)) == 2
    (runtime,) = WORKLOADS["trainjob"].before(draft)
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 1
    assert len(faults(runtime)) == 2
