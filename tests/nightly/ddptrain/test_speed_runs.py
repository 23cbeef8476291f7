"""50 steps on images of CIFAR-10's size."""

import pytest
from tests.unit.ddptrain.test_speed_runs import compare


# torch's Muon computes in bf16, so the last bits of a loss grow.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "batch_size", "rel"), [("cifar10-94", 8, 1e-3), ("cifar10-96", 2, 1e-6)])
def test_the_losses_of_50_steps_equal_those_of_a_plain_implementation(recipe: str, batch_size: int, rel: float) -> None:
    compare(recipe, size_px=32, batch_size=batch_size, epochs=5, steps=10, rel=rel)
