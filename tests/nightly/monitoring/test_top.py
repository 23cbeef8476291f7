"""``ddpctl top`` in a real terminal (tmux): live numbers, a terminal that shrinks, a straggler, the end of the run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl, node_log, wait_until

pytestmark = [
    pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux (apt install tmux)"),
    pytest.mark.timeout(1800),
]
BUSY_S = 600  # what anything may take on a machine that has much else to do
PATH = os.environ["PATH"]
HERE = Path(__file__).parent


class Terminal:
    """A terminal of its own, in which one command runs."""

    def __init__(self, socket: Path, command: str, *, columns: int, lines: int) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        self.run("new-session", "-d", "-x", str(columns), "-y", str(lines), f"{command}; sleep 600")

    def run(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], capture_output=True, text=True, timeout=30, check=True).stdout

    def shown(self) -> list[str]:
        """The lines of the screen."""
        return self.run("capture-pane", "-p").splitlines()

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, "\n".join(self.shown()), re.MULTILINE) is not None


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Terminal]:
    """``ddpctl top`` of a training that continues, of whose four ranks the last is slow."""
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("LANG", "C.UTF-8")
    launch = ("launch", "--detach", "--nodes", "2", "--gpus", "2", "--device", "cpu", "--name", "live")
    done = ddpctl(*launch, "--", "slow_rank.py", "3", "--epochs", "5000", "--batch-size", "128", cwd=HERE)
    assert done.returncode == 0, done.stderr
    command = shlex.join([sys.executable, "-P", "-m", "ddpctl", "top", "live", "--every", "1"])
    opened = Terminal(tmp_path / "tmux", command, columns=110, lines=30)
    try:
        wait_until(lambda: re.search(r"epoch\s+1/", node_log(tmp_path, "live")), "the first epoch", timeout_s=BUSY_S)
        yield opened
    finally:
        ddpctl("stop", "live", "--kill")
        opened.run("kill-server")


def test_top_shows_live_numbers_a_straggler_and_the_end(terminal: Terminal) -> None:
    wait_until(lambda: terminal.shows(r"^loss "), "the loss", timeout_s=BUSY_S)
    wait_until(lambda: terminal.shows(r"^throughput [\d,]+ samples"), "the second look", timeout_s=BUSY_S)
    wait_until(
        lambda: terminal.shows(r"^   3     1 +\d.*slow: \d+\.\d x the others$"), "the straggler", timeout_s=BUSY_S
    )
    shown = terminal.shown()
    assert shown[0] == "live  training  2 nodes x 2 ranks of slow_rank.py on local"
    assert re.match(r"step +[\d,]+ of [\d,]+  [█░]{20} \d+ %", shown[1]), shown[1]
    assert re.match(r"throughput [\d,]+ samples/s +[▁▂▃▄▅▆▇█ ]+$", shown[2]), shown[2]
    assert re.match(r"loss +\d\.\d{4}  test \d+\.\d % ", shown[3]), shown[3]
    assert re.match(r"goodput +\d+ %   4 of 4 ranks   no restart", shown[4]), shown[4]
    table = next(number for number, line in enumerate(shown) if line.startswith("RANK  NODE  STEP"))
    assert [line.split()[:2] for line in shown[table + 1 : table + 5]] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]

    first = shown[1]
    wait_until(lambda: terminal.shown()[1] != first, "another step", timeout_s=BUSY_S)
    terminal.run("resize-window", "-x", "46", "-y", "12")
    wait_until(lambda: terminal.shows(r"^and \d more ranks"), "the small screen", timeout_s=BUSY_S)
    assert any(line.split()[:1] == ["3"] for line in terminal.shown()), "the straggler stays in sight"
    terminal.run("resize-window", "-x", "110", "-y", "30")

    assert ddpctl("stop", "live").returncode == 0
    wait_until(lambda: terminal.shows(r"^live  stopped, exit code 143"), "the end", timeout_s=BUSY_S)


def test_q_leaves_and_the_run_goes_on(terminal: Terminal) -> None:
    wait_until(lambda: terminal.shows(r"^   3     1 "), "the ranks", timeout_s=BUSY_S)
    terminal.run("send-keys", "q")
    wait_until(lambda: "sleep" in terminal.run("list-panes", "-F", "#{pane_current_command}"), "top's end")
    wait_until(lambda: terminal.shows(r"^live  training"), "the last screen")
    assert '"state": "training"' in ddpctl("status", "live", "--json").stdout
