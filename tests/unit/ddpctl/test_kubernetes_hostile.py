"""Generated configurations, from the file to the manifest; bench/kubernetes.py runs 10,000 of them."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from tests.unit.ddpctl.kubernetes_hostile import CANARY, CONFIGURATIONS
from tests.unit.ddpctl.kubernetes_trial import expand, trial

from ddpctl.targets.kubernetes.pod import dump, literal

pytestmark = pytest.mark.e2e


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(CONFIGURATIONS)
def test_no_configuration_breaks_the_renderer(configuration: tuple[dict[str, Any], dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trial(Path(folder), *configuration)
        assert not list(Path(folder).rglob(f"*{CANARY}*"))
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(
    "text", ["$(HOSTNAME)", "$$(HOSTNAME)", "$$", "$", "a$b$$c", "$$$", "$$$(X)", "price: 5$", "${HOME}", "$("]
)
def test_what_kubernetes_would_expand_arrives_as_it_is(text: str) -> None:
    assert expand(literal(text)) == text


@pytest.mark.parametrize(
    "text", ["1e3", "1:30", "on", "Yes", "0x1F", "~", "null", "-1", "1_000", ".5", "=", "2026-01-01", "y"]
)
def test_text_that_a_reader_of_yaml_may_take_for_something_else_is_quoted(text: str) -> None:
    assert dump([{"a": text}]) == f"a: '{text}'\n"
    assert yaml.safe_load(dump([{text: text}])) == {text: text}
