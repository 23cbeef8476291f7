"""What must not be mailed."""

import pytest

from ddpctl.job import secrets


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://me:pw@proxy:3128/x", "http://me:[REDACTED]@proxy:3128/x"),
        ("s3://u:pa/ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("s3://u:p@ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("git+https://:ghp_abc@github.com/x", "git+https://:[REDACTED]@github.com/x"),
        ("ssh://git@github.com/x https://github.com/x@v1", "ssh://git@github.com/x https://github.com/x@v1"),
        ("http://host:3128/x tcp://a:1 b@c", "http://host:3128/x tcp://a:1 b@c"),
        ("a value s3cr3tvalue alone", "a value [REDACTED] alone"),
        ("{'a': 'two ö\\'s\\n\"words\"'}", "{'a': '[REDACTED]'}"),
        ('{"a": "two \\u00f6\'s\\n\\"words\\""}', '{"a": "[REDACTED]"}'),
        ("https://h/?a=two%20%C3%B6%27s%0A%22words%22&b", "https://h/?a=[REDACTED]&b"),
        ("a value that is too short: ab", "a value that is too short: ab"),
        ("step 5 tokens: 4,096 loss: 0.3", "step 5 tokens: 4,096 loss: 0.3"),
    ],
)
def test_a_secret_in_a_text_is_redacted(text: str, redacted: str) -> None:
    assert secrets.redact_text(text, ["s3cr3tvalue", "ab", 'two ö\'s\n"words"']) == redacted


def test_the_argument_of_a_secret_flag_is_redacted() -> None:
    command = ("train.py", "--token", "hf_abc", "--api-key=1", "--lr", "0.1", "--auth-token", "--epochs", "3")
    assert secrets.redact_command(command) == (
        "train.py", "--token", "[REDACTED]", "--api-key=[REDACTED]", "--lr", "0.1", "--auth-token", "--epochs", "3",
    )  # fmt: skip
    assert secrets.redact_command(("--passphrase", "-abc d", "--token=a, b", "-v")) == (
        "--passphrase", "[REDACTED]", "--token=[REDACTED]", "-v",
    )  # fmt: skip


def test_variables_with_secret_names_are_redacted() -> None:
    env = {"HF_TOKEN": "x", "LR": "0.1", "SECRET_EMPTY": "", "URL": "s3://a:b@c"} | {
        "pod": {"spec": [{"env": [{"name": "API_KEY", "value": "k"}], "auth": ["a"], "cpus": 2}]}
    }
    assert secrets.redact_mapping(env) == {
        "HF_TOKEN": "[REDACTED]",
        "LR": "0.1",
        "SECRET_EMPTY": "",
        "URL": "s3://a:[REDACTED]@c",
        "pod": "{'spec': [{'env': [{'name': 'API_KEY', 'value': '[REDACTED]'}], 'auth': '[REDACTED]', 'cpus': 2}]}",
    }
