"""Which of a job's words look like a secret, and which only sound like one."""

import pytest
from tests.wording import Wording

from ddpctl.secrets import exposed, exposed_arguments
from ddpctl.spec import JobSpec


@pytest.mark.parametrize(
    "command",
    [
        ("--token", "abc"),
        ("--token=abc",),
        ("api_key=abc",),
        ("--wandb-api-key", "abc", "--token", "x", "--token", "y"),
        ("--authorization", "Basic abc"),
    ],
    ids=" ".join,
)
def test_the_options_that_look_secret(command: tuple[str, ...], wording: Wording) -> None:
    said = exposed_arguments(JobSpec(command=("train.py", *command)))
    assert said is not None
    wording(said)


@pytest.mark.parametrize(
    "command",
    [
        ("--token",),
        ("--token", "--lr", "0.1"),
        ("--use-auth-token", "true"),
        ("--tokenizer", "gpt2", "--max-tokens", "4096", "--token-dim", "64"),
        ("--token-file", "/run/secrets/hub", "--password_env", "DB"),
        ("--author", "me", "--lr", "0.1", "/data/secret=1"),
    ],
    ids=" ".join,
)
def test_the_options_that_only_sound_secret(command: tuple[str, ...]) -> None:
    assert exposed_arguments(JobSpec(command=("train.py", *command))) is None


def test_the_variables_that_look_secret(wording: Wording) -> None:
    env = {"TOKEN": "abc", "SIGN_KEY": "abc", "TOKENIZERS_PARALLELISM": "false", "SECRET_NAME": "db", "PASSWORD": ""}
    said = exposed(JobSpec(env=env))
    assert said is not None
    wording(said)
    assert exposed(JobSpec(env={"NCCL_DEBUG": "INFO"})) is None


def test_our_own_trainer_has_no_words() -> None:
    assert exposed_arguments(JobSpec()) is None
