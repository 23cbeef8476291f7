"""What must not be mailed."""

import json
import shlex
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpctl import secrets

NAMES = ("password", "HF_TOKEN", "api-key", "passphrase", "client_secret", "WANDB_API_KEY", "auth.token")
# What no frame of the tests below contains, so that what is found of it was not taken out.
SECRETS = st.text(st.sampled_from("QXZ9 ,;&'\"\\=:/@-#{}[]%é"), min_size=3, max_size=20).filter(
    lambda secret: set(secret) & set("QXZ")
)


@pytest.mark.parametrize(
    ("said", "left"),
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
def test_a_secret_in_a_text_is_redacted(said: str, left: str) -> None:
    assert secrets.redact_text(said, ["s3cr3tvalue", "ab"]) == left


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), secret=SECRETS)
@example(name="password", secret="-Q ")  # noqa: S106 -- no flag, for its quote does not end after it
@example(name="password", secret="-Q,")  # noqa: S106
@example(name="password", secret="\\'Z\" QZ")  # noqa: S106 -- in a shell's quotes a backslash escapes nothing
def test_no_way_to_write_a_value_beside_its_name_leaves_a_part_of_it(name: str, secret: str) -> None:
    for frame in (
        json.dumps({name: secret, "a": 1}),
        json.dumps({name: secret, "a": 1}, ensure_ascii=False, separators=(",", ":")),
        json.dumps(json.dumps({name: secret})),
        repr({name: secret, "a": 1}),
        repr({name: secret.encode()}),
        f"{name}: {secret}",
        f"{name} = {secret}",
        f"{name}={shlex.quote(secret)}",
        f"run --{name}={shlex.quote(secret)} --a b",
        f"run --{name} {shlex.quote(secret)} --a b",
        f"Args({name}={secret!r}, a=1)",
    ):
        assert set(secrets.redact_text(frame)) & set("QXZ") == set(), frame
    for command in ((f"--{name}", f"X{secret}"), (f"--{name}", f"-X{secret}"), (f"--{name}={secret}",)):
        assert set("".join(secrets.redact_command(command))) & set("QXZ") == set(), command


@settings(deadline=None)
@given(st.text(st.sampled_from("QXZ9 ,;&'\"\\=:/@-#%é\n\t"), min_size=6).filter(secrets.can_be_sought))
def test_no_way_to_write_a_known_value_leaves_it(secret: str) -> None:
    lines = [line.strip() for line in secret.splitlines() if secrets.can_be_sought(line)]
    for said in (secret, repr(secret), json.dumps(secret), shlex.quote(secret), *lines):
        left = secrets.redact_text(f"a {said} b", [secret])
        assert secret.strip() not in left
        assert repr(secret.strip())[1:-1] not in left
        assert all(line not in left for line in lines)


@settings(deadline=None)
@given(st.text(st.sampled_from("tokenQXZ ,'\"\\=:/@-[]\n")))
def test_a_text_that_was_redacted_stays_whole(said: str) -> None:
    once = secrets.redact_text(said)
    assert secrets.redact_text(once).replace(secrets.REDACTED, "") in once.replace(secrets.REDACTED, "")


@pytest.mark.parametrize(
    "piece",
    ["token", "token=", 'token="', "token: '", "--token ", "a://b:", "a://b@", "-----BEGIN PRIVATE KEY-----", "token\\",
     "token\n", "token=\\\"", "-token-", "bearer ", "tokens:1", "a.token.", "'token': "],
)  # fmt: skip
def test_a_long_text_takes_linear_time(piece: str) -> None:
    def took(length: int) -> float:
        said = piece * (length // len(piece))
        begun = time.process_time()
        secrets.redact_text(said)
        return time.process_time() - begun

    assert took(200_000) < 40 * max(took(50_000), 0.01), "four times the text, not sixteen times the time"


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
