"""What must not be mailed."""

import pytest

from ddpctl import redact


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("WANDB_API_KEY=abc123 python", "WANDB_API_KEY=[REDACTED] python"),
        ("loading with token: hf_abc", "loading with token: [REDACTED]"),
        ('{"password": "a b"}', '{"password": "[REDACTED] b"}'),
        ("Authorization: Bearer abc.def", "Authorization: [REDACTED]"),
        ("http://me:pw@proxy:3128/x", "http://me:[REDACTED]@proxy:3128/x"),
        ("a value s3cr3tvalue alone", "a value [REDACTED] alone"),
        ("tokens per second 12, monkey business", "tokens per second 12, monkey business"),
        ("step 5: keyword=3", "step 5: keyword=3"),
    ],
)
def test_texts(said: str, left: str) -> None:
    assert redact.text(said, ["s3cr3tvalue", "ab"]) == left


def test_the_word_after_a_flag() -> None:
    command = ("train.py", "--token", "hf_abc", "--api-key=1", "--lr", "0.1", "--auth-token", "--epochs", "3")
    assert redact.words(command) == (
        "train.py", "--token", "[REDACTED]", "--api-key=[REDACTED]", "--lr", "0.1", "--auth-token", "--epochs", "3",
    )  # fmt: skip


def test_variables() -> None:
    env = {"HF_TOKEN": "x", "LR": "0.1", "SECRET_EMPTY": "", "URL": "s3://a:b@c"}
    assert redact.mapping(env) == {
        "HF_TOKEN": "[REDACTED]",
        "LR": "0.1",
        "SECRET_EMPTY": "",
        "URL": "s3://a:[REDACTED]@c",
    }
