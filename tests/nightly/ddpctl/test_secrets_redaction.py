"""What must not be mailed."""

import json
import shlex
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpctl.job import secrets


@settings(deadline=None)
@given(st.text(st.sampled_from("QXZ9 ,;&'\"\\=:/@-#%é\n\t"), min_size=6).filter(secrets.can_be_sought))
def test_no_way_to_write_a_known_value_leaves_it(secret: str) -> None:
    lines = [line.strip() for line in secret.splitlines() if secrets.can_be_sought(line)]
    for form in (secret, repr(secret), json.dumps(secret), shlex.quote(secret), *lines):
        remaining = secrets.redact_text(f"a {form} b", [secret])
        assert secret.strip() not in remaining
        assert repr(secret.strip())[1:-1] not in remaining
        assert all(line not in remaining for line in lines)


@settings(deadline=None)
@given(st.text(st.sampled_from("tokenQXZ ,'\"\\=:/@-[]\n")))
def test_a_text_that_was_redacted_stays_whole(output: str) -> None:
    once = secrets.redact_text(output)
    assert secrets.redact_text(once).replace(secrets.REDACTED, "") in once.replace(secrets.REDACTED, "")


@pytest.mark.parametrize(
    "piece",
    ["token", "a://b:", "a://b@", "a://", "a.b", "://:@", "aaaa:", "@"],
)
def test_a_long_text_takes_linear_time(piece: str) -> None:
    def took(length: int) -> float:
        output = piece * (length // len(piece))
        begun = time.process_time()
        secrets.redact_text(output)
        return time.process_time() - begun

    assert took(200_000) < 40 * max(took(50_000), 0.01), "four times the text, not sixteen times the time"
