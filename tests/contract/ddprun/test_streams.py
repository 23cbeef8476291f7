"""A rank's stdin, stdout and stderr: apart, as they come where one rank is shown, and a terminal where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forks

SCRIPTS = Path(__file__).parent / "scripts"
STARTS = pytest.mark.parametrize("options", [(), ("--exec",)], ids=["fork", "exec"])


@STARTS
def test_one_rank_writes_the_bytes_that_python_writes(tmp_path, options) -> None:
    """And ddprun's own lines apart. Unbuffered, as ddprun sets it: else text that Python buffers would come later."""
    script = str(SCRIPTS / "bytes.py")
    plain = subprocess.run([sys.executable, "-u", script], input=b"typed\n", capture_output=True, check=True)
    command = ["-m", "ddprun", "--run-dir", str(tmp_path / "run"), *options, script]
    ranked = forks.run(command, env=os.environ, given=b"typed\n")
    assert ranked.returncode == 0
    assert ranked.stdout == plain.stdout
    own = [line for line in ranked.stderr.splitlines(keepends=True) if line.startswith(b"[node0] ")]
    assert b"".join(line for line in ranked.stderr.splitlines(keepends=True) if line not in own) == plain.stderr
    assert own
    log = (tmp_path / "run/node-0/rank-0.log").read_bytes()
    both = plain.stdout + plain.stderr
    assert sorted(log.replace(b"\n", b"")) == sorted(both.replace(b"\n", b"")), "only a torn line is ended"


def test_the_order_of_both_streams_is_kept_where_they_lead_to_one_place(tmp_path) -> None:
    script = tmp_path / "both.py"
    script.write_text("import os\nfor number in range(500):\n    os.write(1 + number % 2, b'%d\\n' % number)\n")
    for options in ((), ("--nproc-per-node", "2", "--local-ranks-filter", "0")):
        command = ["-m", "ddprun", "--run-dir", str(tmp_path / "run"), *options, str(script)]
        done = forks.run(command, env=os.environ, stderr=subprocess.STDOUT)
        assert done.returncode == 0
        numbers = [line for line in done.stdout.splitlines() if line.isdigit()]
        assert numbers == [b"%d" % number for number in range(500)]
    assert (tmp_path / "run/node-0/rank-1.log").read_bytes().splitlines() == numbers
