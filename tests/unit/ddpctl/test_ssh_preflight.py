"""Nothing is started unless all hosts are ready."""

from typing import Any

import pytest
from tests.unit.ddpctl.ssh_answers import GPUS, facts, inspected, submit

from ddpctl.command import Command
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError

REFUSALS: list[tuple[str, dict[str, Any], type[DdpctlError], str]] = [
    ("silent", {"end": None}, UnavailableError, "without an error message"),
    (
        "engine",
        {"engine": None, "image": None, "engine_error": "Cannot connect to the Docker daemon"},
        UnavailableError,
        "docker: Cannot connect to the Docker daemon",
    ),
    ("flock", {"flock": None}, UnavailableError, "util-linux"),
    ("writable", {"writable": None}, UnavailableError, "~/.ddpctl"),
    ("disk", {"disk": "1024"}, UnavailableError, "min_disk"),
    (
        "claim",
        {"gpu": GPUS, "claim": f"old 0 970 none {GPUS[0]} {GPUS[2]}", "now": "1000"},
        UnavailableError,
        "run 'old' has been using 2 GPUs for 30 s",
    ),
    ("ticket", {"gpu": GPUS, "ticket": "000000001 old 12ab"}, UnavailableError, "run 'old' is already waiting"),
    (
        "claims",
        {"gpu": GPUS, "claims_error": "another launch is starting a run there"},
        UnavailableError,
        "another launch is starting a run there",
    ),
    ("no-image", {"image": None}, ConfigError, "ddpctl:1"),
    ("other-image", {"image": inspected("sha256:bb")}, ConfigError, "sha256:bb"),
    ("too-few-gpus", {"gpu": GPUS[:1]}, ConfigError, "1 GPU, not 2"),
    ("busy-gpus", {"gpu": GPUS, "busy": GPUS[:2]}, UnavailableError, "1 of 3"),
    (
        "nvidia-smi",
        {"gpu_error": "exit code 15: GPU is lost", "gpu": GPUS},
        UnavailableError,
        "exit code 15: GPU is lost",
    ),
    ("nvidia-runtime", {"gpu": GPUS, "runtimes": "{}"}, UnavailableError, "nvidia-container-toolkit"),
    ("same-machine", {"machine": "gpu1 /home/alice 12ab"}, ConfigError, "box2 and box1"),
]


@pytest.mark.parametrize(("changes", "kind", "cause"), [pytest.param(*row, id=name) for name, *row in REFUSALS])
def test_a_host_that_is_not_ready_is_refused(changes: dict[str, Any], kind: type[DdpctlError], cause: str) -> None:
    gpus = {"gpu": GPUS} if "gpu" in changes else {}
    asked: list[Command] = []
    with pytest.raises(kind) as error:
        submit(facts(1, machine="gpu1 /home/alice 12ab", **gpus), facts(2, **changes), asked=asked)
    lines = str(error.value).splitlines()
    assert (type(error.value), any(command.starts for command in asked)) == (kind, False)
    assert "1 of 2" in lines[0]
    assert [(line.split()[0], line.endswith("not ready")) for line in lines[2:4]] == [("box1", False), ("box2", True)]
    (sentence,) = lines[4:]
    assert (sentence.startswith("box2: "), cause in sentence) == (True, True)
