"""What is assumed of hosts that are not ready, so that a dry run can show its lines. Pure."""

import json
from collections.abc import Sequence
from dataclasses import replace

from ddpctl.spec import JobSpec
from ddpctl.targets.ssh.options import SshOptions
from ddpctl.targets.ssh.preflight import Facts


def assume(options: SshOptions, job: JobSpec, facts: Sequence[Facts]) -> tuple[Facts, ...]:
    """The facts, with ``<words>`` for what a host did not say or does not have: for what is only shown."""
    image = json.dumps(
        [{"Id": "sha256:<image>", "RootFS": {"Layers": []}, "Size": 0, "Created": "", "Os": "", "Architecture": ""}]
    )
    guesses = {
        "id": ("<uid>:<gid>",),
        "home": ("<home>",),
        "ssh": ("- - <address>",),
        "asked": (job.image,),
        "image": () if options.runtime == "none" else (image,),
    }
    gpus = tuple(f"<GPU {number}>" for number in range(job.gpus))
    return tuple(
        replace(
            fact,
            words={
                **guesses,
                **fact.words,
                "image": fact.words["image"] if fact.image else guesses["image"],
                **({} if len(fact.free_gpus) >= job.gpus else {"gpu": gpus, "busy": ()}),
            },
        )
        for fact in facts
    )
