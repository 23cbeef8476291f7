"""Generated configurations: each is a script that bash can read, its #SBATCH lines are what was requested, and no value
escapes its quotes. bench/slurm.py does the same to 10,000, and shows some to shellcheck and to a real sbatch.
"""

import os
import string
import subprocess
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.ddpctl.slurm_standins import StandIns

from ddpctl.job.launch_plan import Plan
from ddpctl.job.schema import validate
from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.batch_script import directives
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget
from ddpwire import job_env

# Free text may be anything that a process can be given; what stands in a #SBATCH line passes its check or is not there.
HOSTILE = st.sampled_from([
    "$(touch CANARY)", "`touch CANARY`", "'; touch CANARY; '", "\ntouch CANARY\n", "CHECK\ntouch CANARY",
    "\nNODE\ntouch CANARY\n", '"; touch CANARY; "', "${IFS}", "a b", "-x", "é\t", "\\", "#", "%x",
])  # fmt: skip
TEXT = st.one_of(HOSTILE, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
NAME = st.text(string.ascii_uppercase, min_size=1, max_size=6).map(lambda name: f"X{name}")
FIELDS = {
    name: st.sampled_from([None, *values]) | TEXT.map(lambda text, name=name: text if _passes(name, text) else None)
    for name, values in {
        "partition": ["a,b"], "account": ["lab"], "constraint": ["a&b"], "gpu_type": ["a100"], "array": ["0-3%2"],
        "python": ["/a b/$(touch CANARY)/python"], "prometheus": ["/tmp/'x"],
    }.items()
}  # fmt: skip


def _passes(name: str, text: str) -> bool:
    return not validate(SlurmOptions, {name: text})[1]


OPTIONS = st.fixed_dictionaries(
    FIELDS | {
        "runtime": st.sampled_from(["none", "pyxis", "apptainer", "podman", "docker"]),
        "runtime_args": st.lists(
            TEXT.map(lambda text: f"--x={text}").filter(lambda text: "\n" not in text), max_size=2
        ).map(tuple),
        "exclusive": st.booleans(),
        "requeues": st.integers(0, 3),
    }
)  # fmt: skip
JOBS = st.fixed_dictionaries(
    {
        "nodes": st.sampled_from(["1", "2", "2:4"]),
        "gpus": st.integers(1, 8),
        "device": st.sampled_from(["auto", "cuda", "cpu"]),
        "command": st.lists(TEXT, max_size=4).map(lambda arguments: ("-m", "x", *arguments)),
        "env": st.dictionaries(NAME, TEXT, max_size=3),
        "memory": st.sampled_from([None, "64Gi"]),
        "time_limit": st.sampled_from([None, "12h", "90m"]),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(job=JOBS, options=OPTIONS)
def test_every_configuration_is_a_script_for_bash(job: dict[str, Any], options: dict[str, Any]) -> None:
    plan = Plan(name="r", job=JobSpec(**job), cwd=".", folder=".", checkpoint_dir="c")
    text = SlurmTarget(SlurmOptions(**options)).render(plan)
    assert text == SlurmTarget(SlurmOptions(**options)).render(plan)
    wanted = [f"#SBATCH {line}" for line in directives(plan.job, SlurmOptions(**options))]
    head = text.split("\nset -euo pipefail")[0]
    assert [line for line in head.split("\n") if line.startswith("#SBATCH")] == [*wanted, "#SBATCH --output=%x-%j.log"]
    done = subprocess.run(["/bin/bash", "-n"], input=os.fsencode(text), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, b""), text


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=JOBS, options=OPTIONS)
def test_no_value_escapes(
    job: dict[str, Any], options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stand_ins = StandIns(tmp_path_factory.mktemp("x"))
    options |= {"python": None, "prometheus": None}
    spec = JobSpec(**job)
    done = stand_ins.run(spec, SlurmOptions(**options))
    program = "ddprun" if options["runtime"] in ("none", "pyxis") else options["runtime"]
    nodes = [call for call in done.of(program) if "ddprun.batch" not in call.argv]
    calls = [call for call in nodes if call.argv[-len(spec.command) :] == spec.command]
    assert len(calls) == 2, done.output
    for call in calls:
        seen = job_env.unpack(call.env)
        assert {name: seen[name] for name in spec.env} == spec.env
    assert not list(stand_ins.folder.rglob("CANARY"))
