"""Which of a job's words look like a secret, and which only sound like one."""

import pytest
from tests.unit.ddpctl import test_secrets

from ddpctl.job.secrets import exposed_arguments
from ddpctl.job.spec import JobSpec


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


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("s3://u:p@ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("http://host:3128/x tcp://a:1 b@c", "http://host:3128/x tcp://a:1 b@c"),
        ('{"a": "two \\u00f6\'s\\n\\"words\\""}', '{"a": "[REDACTED]"}'),
        ("a value that is too short: ab", "a value that is too short: ab"),
    ],
)
def test_a_secret_in_a_text_is_redacted(text, redacted):
    test_secrets.test_a_secret_in_a_text_is_redacted(text, redacted)
