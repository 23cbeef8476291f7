"""What a run has beside its job: its project's files, its secrets, its Service, its NetworkPolicy. Pure."""

from collections.abc import Mapping

from ddpctl.targets.kubernetes.manifest import Object
from ddpctl.targets.kubernetes.pod import Draft


def config_map(draft: Draft, files: Mapping[str, str]) -> Object:
    """The project's files; ``files``: path → content."""
    data = {key: files[path] for key, path in draft.project.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": draft.metadata, "data": data}


def secret(draft: Draft, values: Mapping[str, str]) -> Object:
    """The values of the job's secrets. It goes to kubectl's stdin and nowhere else."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": draft.metadata,
        "type": "Opaque",
        "stringData": dict(values),
    }


def service(draft: Draft) -> Object:
    """The headless Service that gives the pods of a Job their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": draft.metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": draft.selector,
            "ports": [{"name": "rendezvous", "port": draft.port}],
        },
    }


def network_policy(draft: Draft) -> Object:
    """Who reaches a rendezvous can run code: the run's own pods alone; the metrics are for Prometheus as well."""
    monitoring = {"kubernetes.io/metadata.name": draft.options.monitoring_namespace}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": draft.metadata,
        "spec": {
            "podSelector": {"matchLabels": draft.selector},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": draft.selector}}]},
                {
                    "from": [{"namespaceSelector": {"matchLabels": monitoring}}],
                    "ports": [{"port": draft.options.metrics_port}],
                },
            ],
        },
    }
