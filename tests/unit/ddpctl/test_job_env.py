"""A job's variables reach the ranks whatever their names are: bash's own, and those of our scripts. So do a user's own
variables and secrets: what our scripts assign begins with a prefix."""

import pytest

from ddpctl.job.spec import check_secrets


@pytest.mark.parametrize("name", ["UID", "EUID", "PPID", "BASHPID", "SHELLOPTS"])
def test_a_secret_with_a_shells_own_name_is_refused_by_name(name: str) -> None:
    """A script that exports UID ends, and one that exports BASHPID changes nothing."""
    with pytest.raises(ValueError, match=f"^{name} "):
        check_secrets((name,))
