"""Generated configurations, from the file to the manifest; bench/kubernetes.py runs 10,000 of them."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from tests.nightly.ddpctl.kubernetes_hostile import CANARY, CONFIGURATIONS
from tests.nightly.ddpctl.kubernetes_trial import trial


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(CONFIGURATIONS)
def test_no_configuration_breaks_the_renderer(configuration: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trial(Path(folder), *configuration)
        assert not list(Path(folder).rglob(f"*{CANARY}*"))
    assert not Path(CANARY).exists()
