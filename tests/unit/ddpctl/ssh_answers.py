"""What hosts answer, recorded, and a target that is played with it."""

import json
from collections.abc import Iterable
from typing import Any

from ddpctl.command import Command, Output, T, Verb
from ddpctl.errors import NotStartedError
from ddpctl.launch_plan import Plan
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.target import SshTarget

HOSTS = (SshHost(address="box1", peer="10.0.0.1"), SshHost(address="box2", user="alice", port=2222))
OPTIONS = SshOptions(hosts=HOSTS)
BARE = SshOptions(hosts=HOSTS, runtime="none", python="~/venv/bin/python")
JOB = JobSpec(name="digits", nodes="2", gpus=2, env={"A": "b c"}, image="ddpctl:1", mounts=("/data:/data:ro",))
PLAN = Plan(run="night", job=JOB, cwd="/project", run_dir="/s/night", checkpoint_dir="/s/night/checkpoints")
ID = "sha256:" + "a" * 64
OK = Output(returncode=0)
GPUS = ("GPU-0", "GPU-1", "GPU-2")
RUN = Run(
    name="night",
    created=1000.0,
    target="boxes",
    kind="ssh",
    options={},
    job=JOB,
    cwd="/project",
    folder="/s/night",
    checkpoint_dir="box1:~/.ddpctl/runs/night/checkpoints",
    version="0.1.0",
)


def inspected(image_id: str = ID, digests: tuple[str, ...] = ()) -> str:
    said = {"Id": image_id, "RepoDigests": list(digests), "RootFS": {"Layers": []}, "Size": 1, "Created": "",
            "Os": "linux", "Architecture": "amd64"}  # fmt: skip
    return json.dumps([said])


def facts(number: int = 1, **words: str | tuple[str, ...] | None) -> Output:
    """What a host that is ready says, with other words laid over it."""
    said: dict[str, Any] = {
        "id": "1000:1000",
        "home": "/home/alice",
        "ssh": f"10.0.0.9 4000 10.0.0.{number} 22",
        "writable": "yes",
        "disk": "104857600",
        "flock": "yes",
        "engine": "28.2.2",
        "runtimes": '{"nvidia":{}}',
        "asked": "ddpctl:1",
        "image": inspected(),
        "end": "yes",
        **words,
    }
    lines = [
        f"{word} {one}"
        for word, value in said.items()
        if value is not None
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    return Output(returncode=0, stdout="\n".join(lines) + "\n")


CLOCKS = tuple(Output(returncode=0, stdout=f"{1000 + ahead}.5\n") for ahead in (0, 0, 0))
SECRET = Output(returncode=0, stdout="0123456789abcdef")
PORT = (Output(returncode=0, stdout='{"port": 61000}\n'), SECRET)


def play(verb: Verb[T], answers: Iterable[tuple[Output, ...]]) -> tuple[list[tuple[Command, ...]], T]:
    asked = [next(verb)]
    try:
        for answer in answers:
            asked.append(verb.send(answer))
    except StopIteration as stop:
        return asked, stop.value
    raise AssertionError(f"it wants another answer, to {asked[-1]}")


def submit(*said: Output, options: SshOptions = OPTIONS, plan: Plan = PLAN) -> tuple[list[tuple[Command, ...]], Any]:
    """What a launch asks, and its submission; the reason of a NotStartedError, which is its cause."""
    try:
        return play(SshTarget(options).submit(plan, attached=True), [said, CLOCKS, PORT, (OK, OK)])
    except NotStartedError as error:
        raise error.reason from error
