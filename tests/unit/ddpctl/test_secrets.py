"""Which of a job's words look like a secret, and which only sound like one."""

import pytest

from ddpctl.job.secrets import exposed, exposed_arguments, exposed_values
from ddpctl.job.spec import JobSpec


@pytest.mark.parametrize(
    ("command", "secrets"),
    [
        (("--token", "abc"), "[TOKEN]"),
        (("--token=abc",), "[TOKEN]"),
        (("api_key=abc",), "[API_KEY]"),
        (("--wandb-api-key", "abc", "--token", "x", "--token", "y"), "[WANDB_API_KEY, TOKEN]"),
        (("--authorization", "Basic abc"), "[AUTHORIZATION]"),
    ],
)
def test_an_option_that_looks_secret_is_named_as_a_secret_and_its_value_is_not(
    command: tuple[str, ...], secrets: str
) -> None:
    warning = exposed_arguments(JobSpec(command=("train.py", *command)))
    assert warning is not None
    assert (command[0].partition("=")[0] in warning, f"secrets: {secrets}" in warning) == (True, True)
    assert "abc" not in warning


def test_the_variables_that_look_secret() -> None:
    env = {"TOKEN": "abc", "SIGN_KEY": "abc", "TOKENIZERS_PARALLELISM": "false", "SECRET_NAME": "db", "PASSWORD": ""}
    warning = exposed(JobSpec(env=env))
    assert warning is not None
    assert "secrets: [TOKEN, SIGN_KEY]" in warning
    assert exposed(JobSpec(env={"NCCL_DEBUG": "INFO"})) is None


def test_our_own_trainer_has_no_words() -> None:
    assert exposed_arguments(JobSpec()) is None


def test_options_of_commands_on_a_node_are_secret_as_those_of_the_script() -> None:
    job = JobSpec(node_setup=("API_KEY=abc12345 login --password 'x y 12345'; ls",), node_teardown=("rm --token 'a",))
    assert exposed_values(job) == ["abc12345", "x y 12345", "'a"]
    warning = exposed_arguments(job) or ""
    assert [name for name in ("API_KEY", "--password", "--token") if name not in warning] == []
