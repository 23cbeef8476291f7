"""The test that waits for a time begins first, so that others have the cores meanwhile."""

import pytest

WAITING = "test_ranks_save_before_the_deadline"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name != WAITING)
