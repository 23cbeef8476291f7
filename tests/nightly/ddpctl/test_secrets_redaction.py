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
