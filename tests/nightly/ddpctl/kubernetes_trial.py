"""One generated configuration, from its file to the manifest: refused with a line for each error, or rendered exactly.

For the tests and for bench/kubernetes.py. Raises AssertionError for whatever must not happen.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from tests.unit.ddpctl.kubernetes_judges import faults, restricted
from tests.unit.ddpctl.kubernetes_lab import expand, plan_of

from ddpctl import targets
from ddpctl.errors import ConfigError, FileError
from ddpctl.job import config
from ddpctl.job.launch_plan import ddprun_args, program
from ddpctl.targets.kubernetes import target
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.pod import Draft
from ddpctl.targets.kubernetes.target import KubernetesTarget

LINE = re.compile(r"ddpctl\.yaml:\d+:\d+: \S.*")


def trial(folder: Path, job: dict[str, Any], options: dict[str, Any]) -> str:
    """Return "refused", or the kind of the workload that was rendered."""
    document = {
        "job": {key: list(value) if isinstance(value, tuple) else value for key, value in job.items()},
        "target": "lab",
        "targets": {
            "lab": {"kind": "kubernetes"}
            | {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
        },
    }
    path = folder / "ddpctl.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=False), encoding="utf-8")
    try:
        settings = config.load(file=path, kinds=targets.kinds())
    except FileError as error:
        lines = str(error).replace(f"{folder}/", "").split("\n")
        assert all(LINE.fullmatch(line) for line in lines), lines
        return "refused"
    plan = plan_of(settings.job, run=f"{settings.job.name}-otter"[:40].rstrip("-"))
    try:
        text = KubernetesTarget(settings.options).render(plan)
    except ConfigError:  # what is known once the workload is
        return "refused"
    assert KubernetesTarget(settings.options).render(plan) == text
    draft = Draft(plan=plan, options=settings.options, project={})
    workload = WORKLOADS["pytorchjob" if settings.options.workload == "auto" else settings.options.workload]
    things = list(yaml.safe_load_all(text))
    expected = [*workload.before(draft), workload.job(draft)]
    assert things[-len(expected) :] == expected
    assert {thing["kind"] for thing in things} <= {"NetworkPolicy", *(thing["kind"] for thing in expected)}
    pod = target.bare_pod(draft, workload)
    for thing in (*things, pod):
        assert faults(thing, ("1.36",)) == [], thing
    if settings.options.profile == "restricted" and not any("hostPath" in volume for volume in pod["spec"]["volumes"]):
        assert restricted(pod) == []
    _arrives(pod, plan, settings)
    return workload.kind


def _arrives(pod: dict[str, Any], plan: Any, settings: Any) -> None:
    """The arguments and the variables reach the container as they were given."""
    container = pod["spec"]["containers"][0]
    args = [expand(word) for word in container["args"]]
    expected = list(ddprun_args(plan))
    assert args[-len(expected) :] == expected
    assert args[-len(program(settings.job.command)) :] == list(program(settings.job.command))
    env = {entry["name"]: expand(entry["value"]) for entry in container["env"] if "value" in entry}
    for name, value in settings.job.env.items():
        assert env.get(name, value) == value
    assert len({entry["name"] for entry in container["env"]}) == len(container["env"])
