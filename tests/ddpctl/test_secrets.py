"""Which of a job's words look like a secret, and which only sound like one."""

import pytest

from ddpctl.secrets import exposed, exposed_arguments
from ddpctl.spec import JobSpec


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("--token", "abc"), "--token"),
        (("--token=abc",), "--token"),
        (("api_key=abc",), "api_key"),
        (("--wandb-api-key", "abc", "--token", "x", "--token", "y"), "--wandb-api-key, --token"),
        (("--authorization", "Basic abc"), "--authorization"),
        (("--token",), None),
        (("--token", "--lr", "0.1"), None),
        (("--use-auth-token", "true"), None),
        (("--tokenizer", "gpt2", "--max-tokens", "4096", "--token-dim", "64"), None),
        (("--token-file", "/run/secrets/hub", "--password_env", "DB"), None),
        (("--author", "me", "--lr", "0.1", "/data/secret=1"), None),
    ],
)
def test_the_options_that_look_secret(command: tuple[str, ...], named: str | None) -> None:
    said = exposed_arguments(JobSpec(command=("train.py", *command)))
    assert (said and said.partition(" stands in ")[0]) == (named and f"the value of {named}")


def test_the_variables_that_look_secret() -> None:
    env = {"TOKEN": "abc", "SIGN_KEY": "abc", "TOKENIZERS_PARALLELISM": "false", "SECRET_NAME": "db", "PASSWORD": ""}
    assert exposed(JobSpec(env=env)) == (
        "env: the value of TOKEN, SIGN_KEY stands in specs and records as it is: "
        "secrets: [TOKEN, SIGN_KEY] takes it from your environment and keeps it out of them"
    )
    assert exposed(JobSpec(env={"NCCL_DEBUG": "INFO"})) is None


def test_our_own_trainer_has_no_words() -> None:
    assert exposed_arguments(JobSpec()) is None
