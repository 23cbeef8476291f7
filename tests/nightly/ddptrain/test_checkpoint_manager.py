"""Where a training starts, and what is refused. One process, a tiny training."""

from collections.abc import Callable
from pathlib import Path

from tests.facts import assert_names
from tests.unit.ddptrain.test_checkpoint_manager import TINY

FULL_DISK = """
import resource, runpy, sys
sys.dont_write_bytecode = True  # a torn .pyc would outlive the test
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, resource.RLIM_INFINITY))
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


def test_a_disk_that_fills_up_stops_no_step(train: Callable[..., list], tmp_path: Path) -> None:
    """A limit on files' size, which the kernel enforces as it does a full disk."""
    ended = train(*TINY, "--epochs=2", command=("-c", FULL_DISK))[0]
    assert ended.code == 73
    assert [line.split()[0] for line in ended.out.splitlines()] == ["simple", "epoch", "epoch"]
    assert_names(ended.err, "checkpoints/step-00000004.pt", "checkpoints/step-00000008.pt")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".lock"]
