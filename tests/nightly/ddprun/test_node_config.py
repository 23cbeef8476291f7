"""More rows of what is refused by name in flags and variables."""

import pytest
from tests.unit.ddprun.test_node_config import TWO, read

from ddprun.system.errors import NodeError


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--nnodes", "0"], {}, "--nnodes '0'"),
        ([], TWO | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK '-1'"),
        (["--grace", "1e10"], {}, "--grace '1e10'"),
        (["--join-timeout", "nan"], {}, "--join-timeout 'nan'"),
        (["--local-ranks-filter", "0,"], {}, "--local-ranks-filter '0,'"),
        (["--debug-rank", "-1"], {}, "--debug-rank '-1'"),
        (["--debug-rank", "8"], TWO, "--debug-rank '8'"),
    ],
)
def test_a_value_out_of_range_is_refused(argv, environ, named):
    with pytest.raises(NodeError) as caught:
        read(argv, environ)
    assert (caught.value.outcome.code, caught.value.outcome.cause) == (78, "config")
    assert [word for word in named.split() if word not in str(caught.value)] == []
