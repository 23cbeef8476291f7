"""Pods of every shape that is not daily (tests/cluster/test_operator_environment.py) train to the same weights."""

import pytest
from bench import lab
from tests.cluster.test_operator_environment import DAILY, machines, shapes, train

__all__ = ["machines"]  # a fixture
WEIGHTS: dict[str, str] = {}  # of the shapes that have been tried: all must agree


@pytest.mark.parametrize("shape", [shape for shape in shapes() if shape not in DAILY])
def test_pods_train_to_the_weights_of_all_shapes(shape: str, machines: tuple[lab.Machine, ...]) -> None:
    WEIGHTS[shape] = train(shapes()[shape], machines)
    assert len(set(WEIGHTS.values())) == 1, WEIGHTS
