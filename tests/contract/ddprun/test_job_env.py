"""The variables of a job that ddprun is given in one."""

import json

from ddpwire import job_env

ENV = {"HOME": "/elsewhere", "PATH": "", "UID": "7", "PS4": "'+ \"\n", "LD_BIND_NOW": "1", "DDP_PUSHGATEWAY": ""}


def test_a_rank_sees_them_and_so_does_ddprun_from_its_start(runs):
    node = runs.start("environment.py", *ENV, "DDP_JOB_ENV", env=job_env.pack(ENV))
    assert node.end() == 0
    assert json.loads(node.log(0)) == {**ENV, "DDP_PUSHGATEWAY": None, "DDP_JOB_ENV": None}
