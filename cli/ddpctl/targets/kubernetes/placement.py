"""Which machines a pod goes to, and for how long a lost one is waited for. Pure."""

from typing import Any

from ddpctl.targets.kubernetes.manifest import Object, drop_empty
from ddpctl.targets.kubernetes.options import KubernetesOptions, toleration

_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def placement(options: KubernetesOptions, selector: dict[str, str], *, taken: list[str]) -> Object:
    """The fields of a pod's spec; ``selector``: the labels of all its run's pods; ``taken``: scarce resources."""
    return drop_empty(
        {
            "schedulerName": options.scheduler,
            "priorityClassName": options.priority_class,
            "nodeSelector": dict(options.node_selector),
            "tolerations": _tolerations(options, taken),
            "affinity": _affinity(options, selector),
            "topologySpreadConstraints": _spread(options, selector),
        }
    )


def _tolerations(options: KubernetesOptions, taken: list[str]) -> list[Object]:
    return [
        *({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taken),
        *(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": options.lost_node}
            for key in _LOST
        ),
        *map(toleration, options.tolerations),
    ]


def _spread(options: KubernetesOptions, selector: dict[str, str]) -> list[Any]:
    if options.spread == "none":
        return []
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule" if options.spread == "require" else "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
    ]


def _affinity(options: KubernetesOptions, selector: dict[str, str]) -> Object:
    if not options.together:
        return {}
    term = {"topologyKey": options.together, "labelSelector": {"matchLabels": selector}}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }
