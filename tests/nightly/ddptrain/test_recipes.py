"""Further recipes that are refused."""

import pytest
from tests.unit.ddptrain import test_recipes


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        pytest.param("mine.yaml", "[]", id="list"),
        pytest.param("mine.yaml", "options: {lr: -1}", id="negative-lr"),
        pytest.param("mine.yaml", "options: {epochs: 3}", id="incomplete"),
    ],
)
def test_a_wrong_recipe_is_refused(recipe, text, tmp_path, monkeypatch, capsys):
    test_recipes.test_a_wrong_recipe_is_refused(recipe, text, tmp_path, monkeypatch, capsys)
