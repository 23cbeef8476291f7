"""What must not be mailed."""

import pytest

from ddpctl import secrets


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("+ WANDB_API_KEY=abc123 python", "+ WANDB_API_KEY=[REDACTED] python"),
        ("WANDB_API_KEY=correct horse", "WANDB_API_KEY=[REDACTED]"),
        ("[node0 rank1] WANDB_API_KEY=correct horse\nLR=1", "[node0 rank1] WANDB_API_KEY=[REDACTED]\nLR=1"),
        ("loading with token: hf_abc", "loading with token: [REDACTED]"),
        ("password: correct horse, battery", "password: [REDACTED]"),
        ("password = correct horse", "password = [REDACTED]"),
        ('{"password": "a b", "lr": 1}', '{"password": "[REDACTED]", "lr": 1}'),
        ("{'lr': 1, 'token': b'a\\'b c'}", "{'lr': 1, 'token': [REDACTED]}"),
        ('"{\\"token\\": \\"a b\\"}"', '"{\\"token\\": [REDACTED]'),
        ('{"tokens": ["a b", "c d"], "lr": 1}', '{"tokens": [REDACTED]'),
        ("Namespace(token='a b', lr=1)", "Namespace(token=[REDACTED] lr=1)"),
        ("curl 'https://h/x?token=a,b'", "curl 'https://h/x?token=[REDACTED]"),
        ("train.py --passphrase X --lr 1", "train.py --passphrase [REDACTED] --lr 1"),
        ("['train.py', '--token', 'a b', '--lr']", "['train.py', '--token', [REDACTED] '--lr']"),
        ("train.py --token --lr 1", "train.py --token --lr 1"),
        ("train.py --token -abc", "train.py --token [REDACTED]"),
        ("train.py --token '-a b' '--lr'", "train.py --token '[REDACTED]' '--lr'"),
        ("['train.py', '--token', '--lr']", "['train.py', '--token', '--lr']"),
        ("Authorization: Bearer abc.def", "Authorization: [REDACTED]"),
        ("sent Bearer abc.def, and", "sent Bearer [REDACTED], and"),
        ("http://me:pw@proxy:3128/x", "http://me:[REDACTED]@proxy:3128/x"),
        ("s3://u:pa/ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("s3://u:p@ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("git+https://ghp_abc@github.com/x", "git+https://[REDACTED]@github.com/x"),
        ("https://ghp_abcdefghijklmnopqrstu:x@github.com", "https://[REDACTED]:[REDACTED]@github.com"),
        ("ssh://git@github.com/x https://github.com/x@v1", "ssh://git@github.com/x https://github.com/x@v1"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nand", "[REDACTED]\nand"),
        ("a value s3cr3tvalue alone", "a value [REDACTED] alone"),
        ("tokens per second 12, monkey business", "tokens per second 12, monkey business"),
        ("step 5 tokens: 4,096 loss: 0.3", "step 5 tokens: 4,096 loss: 0.3"),
        ('{"max_tokens": 4096, "token": null}', '{"max_tokens": 4096, "token": null}'),
        ('{"token": ""}', '{"token": ""}'),
        ("step 5: keyword=3", "step 5: keyword=3"),
    ],
)
def test_a_secret_in_a_text_is_redacted(text: str, redacted: str) -> None:
    assert secrets.redact_text(text, ["s3cr3tvalue", "ab"]) == redacted


def test_the_argument_of_a_secret_flag_is_redacted() -> None:
    command = ("train.py", "--token", "hf_abc", "--api-key=1", "--lr", "0.1", "--auth-token", "--epochs", "3")
    assert secrets.redact_command(command) == (
        "train.py", "--token", "[REDACTED]", "--api-key=[REDACTED]", "--lr", "0.1", "--auth-token", "--epochs", "3",
    )  # fmt: skip
    assert secrets.redact_command(("--passphrase", "-abc d", "--token=a, b", "-v")) == (
        "--passphrase", "[REDACTED]", "--token=[REDACTED]", "-v",
    )  # fmt: skip


def test_variables_with_secret_names_are_redacted() -> None:
    env = {"HF_TOKEN": "x", "LR": "0.1", "SECRET_EMPTY": "", "URL": "s3://a:b@c", "MORE": {"token": "a b"}}
    assert secrets.redact_mapping(env) == {
        "HF_TOKEN": "[REDACTED]",
        "LR": "0.1",
        "SECRET_EMPTY": "",
        "URL": "s3://a:[REDACTED]@c",
        "MORE": "{'token': '[REDACTED]'}",
    }
