"""All pairs of the jobs and options of tests/unit/ddpctl/test_kubernetes_manifests.py give valid manifests."""

import pytest
from tests.unit.ddpctl.test_kubernetes_manifests import cases, check_pod_security, check_schemas

from ddpctl.spec import JobSpec
from ddpctl.targets.kubernetes.options import KubernetesOptions

CASES = cases(all_pairs=True)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_the_schemas_accept_every_object(job: JobSpec, options: KubernetesOptions) -> None:
    assert len(CASES) > 150
    check_schemas(job, options)


@pytest.mark.parametrize(("job", "options"), CASES)
def test_pod_security_restricted_admits_every_pod(job: JobSpec, options: KubernetesOptions) -> None:
    check_pod_security(job, options)
