"""Nothing is started unless all hosts are ready: every refusal's whole text."""

from typing import Any

import pytest
from tests.ddpctl.ssh_answers import GPUS, ID, facts, inspected, submit

from ddpctl.errors import ConfigError, DdpctlError, UnavailableError

REFUSALS: list[tuple[dict[str, Any], type[DdpctlError], str]] = [
    ({"end": None}, UnavailableError, "it said nothing"),
    (
        {"engine": None, "image": None, "engine_error": "Cannot connect to the Docker daemon"},
        UnavailableError,
        "docker: Cannot connect to the Docker daemon",
    ),
    ({"flock": None}, UnavailableError, "flock is missing there: install util-linux"),
    (
        {"writable": None},
        UnavailableError,
        "~/.ddpctl cannot be written there: set the target's 'home' to a folder that can",
    ),
    (
        {"disk": "1024"},
        UnavailableError,
        "its disk is full: 0.0 GiB free where runs are kept (~/.ddpctl), 1 GiB needed (min_disk)",
    ),
    (
        {"lock": ("old", "old")},
        UnavailableError,
        "the run old is there, and a host has one run: wait for it, or ddpctl stop old",
    ),
    (
        {"image": None},
        ConfigError,
        "it does not have the image ddpctl:1: ddpctl image ship sends it, or pull it there",
    ),
    (
        {"image": inspected("sha256:bb")},
        ConfigError,
        f"ddpctl:1 is sha256:bb there, but {ID} is wanted, as on box1: give all hosts the same one (ddpctl image ship)",
    ),
    (
        {"gpu": GPUS[:1]},
        ConfigError,
        "it has 1 GPU, 2 needed: ask for fewer, or --device cpu for CPU ranks",
    ),
    (
        {"gpu": GPUS, "busy": GPUS[:2]},
        UnavailableError,
        "1 of its 3 GPUs is free, 2 needed: others compute on the rest (nvidia-smi)",
    ),
    (
        {"gpu": GPUS, "runtimes": "{}"},
        UnavailableError,
        "docker has no NVIDIA runtime there: install nvidia-container-toolkit",
    ),
]


@pytest.mark.parametrize(("words", "kind", "sentence"), REFUSALS, ids=[next(iter(words)) for words, _, _ in REFUSALS])
def test_a_host_that_is_not_ready_is_refused(words: dict[str, Any], kind: type[DdpctlError], sentence: str) -> None:
    gpus = {"gpu": GPUS} if "gpu" in words else {}
    with pytest.raises(kind) as error:
        submit(facts(1, **gpus), facts(2, **words))
    lines = str(error.value).splitlines()
    assert (type(error.value), error.value.nothing_started) == (kind, True)
    assert lines[0] == "nothing was started: 1 of 2 hosts is not ready"
    assert [(line.split()[0], line.endswith("not ready")) for line in lines[2:4]] == [("box1", False), ("box2", True)]
    assert lines[4:] == [f"box2: {sentence}"]


def test_an_image_is_the_same_by_a_registrys_digest() -> None:
    digest = "reg/ddpctl@sha256:" + "c" * 64
    submit(facts(1, image=inspected(digests=(digest,))), facts(2, image=inspected("sha256:bb", (digest,))))
