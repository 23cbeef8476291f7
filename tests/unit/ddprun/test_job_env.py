"""The variables of a job that ddprun is given in one."""

import json
import subprocess
import sys

import pytest

from ddpwire import job_env, names
from ddpwire.exits import Exit

ENV = {"HOME": "/elsewhere", "PATH": "", "UID": "7", "PS4": "'+ \"\n", "LD_BIND_NOW": "1", "DDP_PUSHGATEWAY": ""}


def test_a_rank_sees_them_and_so_does_ddprun_from_its_start(runs):
    node = runs.start("environment.py", *ENV, "DDP_JOB_ENV", env=job_env.pack(ENV))
    assert node.end() == 0
    assert json.loads(node.log(0)) == {**ENV, "DDP_PUSHGATEWAY": None, "DDP_JOB_ENV": None}


@pytest.mark.parametrize(
    "text",
    ["garbage", "[]", '{"A": 1}', "", "[" * 60_000, '{"A": "\\u0000"}', '{"A=B": ""}', '{"": ""}', '{"A": "\\ud800"}'],
)
def test_what_is_no_such_object_is_refused(text):
    environ = {"PYTHONPATH": ":".join(sys.path), names.JOB_ENV: text}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddprun", "x.py"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == Exit.CONFIG
    assert done.stderr == "ddprun: DDP_JOB_ENV is not a JSON object of names and their text\n"


def test_nothing_to_carry_is_no_variable():
    assert job_env.pack({}) == {}
    assert job_env.unpack({"A": "b"}) == {"A": "b"}
