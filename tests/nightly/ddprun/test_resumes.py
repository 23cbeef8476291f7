"""Further layouts of checkpoints that ranks resume from."""

import pytest
from tests.unit.ddprun import test_resumes


@pytest.mark.parametrize(
    ("files", "others", "differ"),
    [
        ({"run/step-100.pt": "a"}, {"run/step-50.pt": "b"}, True),
        ({"epoch-7.pt": "a"}, {"epoch-6.pt": "b"}, True),
        ({"latest": "x", "261/0.pt": "a"}, {"latest": "y", "200/2.pt": "b"}, True),
        ({"261/.metadata": "m", "261/__0_0.distcp": "0"}, {"261/.metadata": "m", "261/__2_0.distcp": "2"}, False),
        ({"step-261-rank-00.pt": "0"}, {"step-261-rank-02.pt": "2"}, False),
        ({"node0-261.pt": "0"}, {"node1-261.pt": "1"}, False),
        ({"model-00001-of-00004.pt": "0"}, {"model-00003-of-00004.pt": "2"}, False),
        ({"stage-0.pt": "0"}, {"stage-1.pt": "1"}, False),
        ({"encoder.pt": "0"}, {"decoder.pt": "1"}, False),
        ({"last.pt": "a", "rng_0.pt": "0"}, {"rng_2.pt": "2"}, False),
        ({"config.json": "c", "261.pt": "a"}, {"config.json": "c", "200.pt": "b"}, True),
        ({"__0_0.distcp": "0", "__1_0.distcp": "1"}, {"__2_0.distcp": "2", "__3_0.distcp": "3"}, False),
        ({"last.pt": "a", "rng_0.pt": "0"}, {"last.pt": "a", "rng_2.pt": "2"}, False),
    ],
)
def test_files_decide_only_if_the_optimizers_have_counted_different_steps(files, others, differ):
    test_resumes.test_files_decide_only_if_the_optimizers_have_counted_different_steps(files, others, differ)
