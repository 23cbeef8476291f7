"""The variables of a job that ddprun is given in one."""

import pytest

from ddpwire import job_env, names


@pytest.mark.parametrize(
    "text",
    ["garbage", "[]", '{"A": 1}', "", "[" * 60_000, '{"A": "\\u0000"}', '{"A=B": ""}', '{"": ""}', '{"A": "\\ud800"}'],
)
def test_what_is_no_such_object_is_refused(text):
    with pytest.raises(ValueError, match=names.JOB_ENV):
        job_env.unpack({names.JOB_ENV: text})


def test_nothing_to_carry_is_no_variable():
    assert job_env.pack({}) == {}
    assert job_env.unpack({"A": "b"}) == {"A": "b"}
