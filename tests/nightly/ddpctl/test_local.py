"""The target local: its command lines, and what it makes of the answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.answers import matching, perform
from tests.unit.ddpctl.test_local import EIGHT_GPUS, JOB, NODE, PLAN, RUN, SLOW, START, TARGET, show, submit

from ddpctl.command import TIMED_OUT, Output
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.runs.run_status import RunStatus
from ddpctl.targets.local import gpus_of, share_gpus
from ddpwire.machine import visible_devices

VISIBLE = [
    ("0,2,-1,1", ("0", "2")), ("-1", ()), ("", ()), ("NoDevFiles", ()), ("1,1", ()), (" 3, 5,", ("3", "5")),
    ("GPU-a,GPU-b", ("GPU-a", "GPU-b")), ("GPU-a,1", ("GPU-a",)), ("1,GPU-a", ("1",)), ("MIG-a,MIG-b", ("MIG-a",)),
]  # fmt: skip


@pytest.mark.parametrize(("variable", "gpus"), VISIBLE)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable: str, gpus: tuple[str, ...]) -> None:
    assert visible_devices(variable) == gpus


def test_mig_instances_are_not_shared_out() -> None:
    with pytest.raises(ConfigError) as error:
        share_gpus(JOB, ("MIG-a",))
    assert (error.value.fields, "MIG" in str(error.value)) == ({}, True)
    assert share_gpus(replace(JOB, nodes="1", gpus=1), ("MIG-a",)) == (("MIG-a",),)


@pytest.mark.parametrize("answer", [SLOW, Output(returncode=127, stderr="test: not found")])
def test_a_script_is_missing_only_where_it_was_looked_for(answer: Output) -> None:
    commands, _ = submit({"test -f": answer})
    assert len(matching(commands, START)) == 2


def test_a_folder_that_is_not_there_is_named() -> None:
    def states(*alive: bool, now: float) -> RunStatus:
        lines = [json.dumps({"alive": report, "node": None, "outcome": None, "gone": True}) for report in alive]
        answer = Output(returncode=0, stdout="\n".join(lines) + "\n")
        return perform(TARGET.status((RUN,), now=now), {"": answer})[1][0]

    going, over = states(True, False, now=1006), states(False, False, now=1006)
    assert (going.state, over.state, over.code) == ("stopping", "lost", 137)
    assert ("nodes 0 and 1" in going.message, "1 node " in going.message) == (True, True)
    assert ("nodes 0 and 1" in over.message, "1 node " in over.message) == (True, False)
    assert states(True, True, now=1000).state == "starting"


def test_what_another_version_wrote_counts_as_not_written() -> None:
    odd = show((True, {"pid": 1}, {"code": 0}), (True, NODE, None))
    assert (odd.state, odd.nodes[0].state, odd.nodes[0].outcome) == ("starting", None, None)


def test_a_target_that_does_not_answer_leaves_the_status_of_the_others(tmp_path: Path) -> None:
    """A run whose Python was removed is unknown; the other is asked."""
    context = launcher.open_context({"DDPCTL_STATE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"})
    runs = tuple(
        replace(RUN, name=name, options={"python": python}, folder=str(tmp_path / name))
        for name, python in (("gone", str(tmp_path / "venv/bin/python")), ("there", sys.executable))
    )
    gone, answered = launcher.status(context, runs)
    assert (gone.run, gone.state) == ("gone", "unknown")
    assert str(tmp_path / "venv/bin/python") in gone.message
    assert (answered.run, answered.state) == ("there", "lost")


@pytest.mark.parametrize("code", [TIMED_OUT, 69])
def test_a_failing_nvidia_smi_is_not_taken_for_no_gpu(code: int) -> None:
    with pytest.raises(UnavailableError):
        gpus_of(Output(returncode=code, stderr="nvidia-smi failed (Unable to determine the device handle)"))


def test_device_cpu_takes_no_gpu() -> None:
    assert share_gpus(replace(JOB, device="cpu"), tuple("abcd")) == ()


def test_each_node_has_its_own_gpus() -> None:
    commands, submission = submit({"ddprun.nodectl gpus": EIGHT_GPUS})
    nodes = matching(commands, START)
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in nodes] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert {command.env["DDP_DEVICE"] for command in nodes} == {"cuda"}
    assert submission.note == ""


def test_device_cpu_asks_for_no_gpu() -> None:
    commands, _ = submit(plan=replace(PLAN, job=replace(JOB, device="cpu")))
    assert matching(commands, "nodectl gpus") == []
    assert {command.env["DDP_DEVICE"] for command in matching(commands, START)} == {"cpu"}


@pytest.mark.parametrize("stdout", ["", "Loading module cuda/12\n", '{"alive": false}\n', "[1]\n"])
def test_an_answer_that_is_not_the_state_of_the_nodes_is_an_error(stdout: str) -> None:
    with pytest.raises(UnavailableError):
        perform(TARGET.status((RUN,), now=0.0), {"": Output(returncode=0, stdout=stdout)})


@pytest.mark.parametrize(
    ("job", "gpus"),
    [
        pytest.param(JOB, 3, id="three-of-four"),
        pytest.param(replace(JOB, device="cuda", nodes="1", gpus=1), 0, id="none-of-one"),
    ],
)
def test_too_few_gpus_are_counted(job: JobSpec, gpus: int) -> None:
    with pytest.raises(ConfigError) as error:
        share_gpus(job, tuple("abcdefgh")[:gpus])
    assert "--device cpu" in str(error.value)
    assert error.value.fields == {"gpus_needed": job.max_nodes * job.gpus, "gpus_found": gpus}


@pytest.mark.parametrize(
    ("job", "attached", "inherited"),
    [
        pytest.param({"nodes": "1", "gpus": 1}, True, True, id="one-rank"),
        pytest.param({"nodes": "1", "gpus": 1}, False, False, id="detached"),
        pytest.param({"nodes": "1", "gpus": 2}, True, False, id="two-ranks"),
        pytest.param({"nodes": "2", "gpus": 1}, True, False, id="two-nodes"),
    ],
)
def test_the_only_rank_of_an_attached_launch_has_its_stdin(
    job: dict[str, Any], attached: bool, inherited: bool
) -> None:
    plan = replace(PLAN, job=replace(JOB, device="cpu", **job))
    commands, _ = submit(plan=plan, attached=attached)
    assert {command.stdin_inherited for command in matching(commands, START)} == {inherited}
