"""The command line and the environment: what they mean, and how wrong ones are refused."""

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain import test_config
from tests.unit.ddptrain.test_config import RANK

from ddptrain.distributed import read_rank_info
from ddptrain.errors import TrainError


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"WORLD_SIZE": None}, id="no-world-size"),
        pytest.param({"RANK": None}, id="no-rank"),
        pytest.param({"RANK": "4"}, id="rank-too-high"),
        pytest.param({"RANK": "-1"}, id="rank-negative"),
        pytest.param({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, id="local-rank-too-high"),
        pytest.param({"MASTER_ADDR": None}, id="no-address"),
        pytest.param({"MASTER_PORT": "99999"}, id="port-too-high"),
        pytest.param({"MASTER_PORT": "0"}, id="port-0"),
        pytest.param({"MASTER_PORT": "tcp://10.0.0.1:80"}, id="port-word"),
    ],
)
def test_wrong_variables_of_a_rank_are_refused(wrong: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**RANK, **wrong}.items() if value is not None}
    with pytest.raises(TrainError) as error:
        read_rank_info(environ)
    assert (error.value.code, error.value.rank) == (78, None)
    assert_names(error.value, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--momentum", "1"], id="momentum-1"),
        pytest.param(["--weigth-decay=1"], id="misspelt-with-value"),
        pytest.param(["--frobnicate"], id="unknown"),
        pytest.param(["photos"], id="positional"),
    ],
)
def test_a_wrong_command_line_is_one_line_from_rank_0(arguments, capsys):
    named = [arguments[0].partition("=")[0]]
    test_config.test_a_wrong_command_line_is_one_line_from_rank_0(arguments, {}, named, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--static-graph", "--accumulate=2"], id="static-graph"),
        pytest.param(["--compile=max-autotune", "--accumulate=2"], id="cuda-graphs-autotuned"),
        pytest.param(["--communication=auto", "--compile=default"], id="auto-and-compile"),
        pytest.param(["--communication=diloco:8", "--ema=0.9"], id="average-of-local-weights"),
        pytest.param(["--communication=localsgd:8", "--sync-bn"], id="local-batch-norms"),
        pytest.param(["--strategy=hybrid", "--communication=bf16"], id="sharded-bf16"),
    ],
)
def test_options_that_exclude_each_other(arguments):
    test_config.test_options_that_exclude_each_other(arguments, 2)
