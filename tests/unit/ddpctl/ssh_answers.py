"""What hosts answer to the target ssh."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.unit.ddpctl.answers import OK, Answer, perform
from tests.unit.ddpctl.records import run_of

from ddpctl.command import Command, Output
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.target import SshTarget

HOSTS = (SshHost(address="box1", peer="10.0.0.1"), SshHost(address="box2", user="alice", port=2222))
OPTIONS = SshOptions(hosts=HOSTS)
BARE = SshOptions(hosts=HOSTS, runtime="none", python="~/venv/bin/python")
JOB = JobSpec(name="digits", nodes="2", gpus=2, env={"A": "b c"}, image="ddpctl:1", mounts=("/data:/data:ro",))
PLAN = Plan(name="night", job=JOB, cwd="/project", folder="/s/night", checkpoint_dir="/s/night/checkpoints")
ID = "sha256:" + "a" * 64
GPUS = ("GPU-0", "GPU-1", "GPU-2")
ON_BOX1 = "box1:~/.ddpctl/runs/night/checkpoints"
RUN = run_of(target="boxes", kind="ssh", job=JOB, cwd="/project", folder="/s/night", checkpoint_dir=ON_BOX1)


def inspected(image_id: str = ID, digests: tuple[str, ...] = ()) -> str:
    image = {"Id": image_id, "RepoDigests": list(digests), "RootFS": {"Layers": []}, "Size": 1, "Created": "",
            "Os": "linux", "Architecture": "amd64"}  # fmt: skip
    return json.dumps([image])


def facts(number: int = 1, **changes: str | tuple[str, ...] | None) -> Output:
    """What a host that is ready answers to the script of preflight, with some of it changed."""
    answers: dict[str, Any] = {
        "id": "1000:1000",
        "home": "/home/alice",
        "ssh": f"192.168.0.9 4000 192.168.0.{number} 22",
        "writable": "yes",
        "disk": "104857600",
        "flock": "yes",
        "engine": "28.2.2",
        "runtimes": '{"nvidia":{}}',
        "asked": "ddpctl:1",
        "image": inspected(),
        "end": "yes",
        **changes,
    }
    lines = [
        f"{name} {value}"
        for name, values in answers.items()
        if values is not None
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    return Output(returncode=0, stdout="\n".join(lines) + "\n")


START = "PET_NODE_RANK="  # a part of the script that starts a node
FACTS = "say end yes"  # of the script of preflight, which has "date" as well: its answer comes first
ANSWERS: dict[str, Answer] = {
    START: OK,
    "ddprun.nodectl port": Output(returncode=0, stdout='{"port": 61000}\n'),
    "store.secret": Output(returncode=0, stdout="0123456789abcdef"),
    "date +%s": Output(returncode=0, stdout="1000.5\n", at=1000.5),
}


def by_host(*outputs: Output, options: SshOptions = OPTIONS) -> dict[str, Output]:
    """The answers of the first hosts of the target."""
    return {host.address: output for host, output in zip(options.hosts, outputs, strict=False)}


def submit(
    *ready: Output,
    options: SshOptions = OPTIONS,
    plan: Plan = PLAN,
    answers: Mapping[str, Answer] = MappingProxyType({}),
    commands: list[Command] | None = None,
) -> tuple[list[Command], Any]:
    """What a launch asks where each host answers so to preflight, and its submission."""
    replies = {FACTS: by_host(*ready, options=options)} | ANSWERS | dict(answers)
    return perform(SshTarget(options).submit(plan, attached=True), replies, commands)
