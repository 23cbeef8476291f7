"""Record a terminal session: a run on two nodes, the kill of a rank, the restart, and the report.

    python bench/recording.py [--svg docs/pictures/launch.svg] [--epochs 6] [--steps 900]

Types commands into bash in a pseudo-terminal, as a person does. Writes an SVG picture of what the terminal showed. The
training script is examples/loop_after.py, and its ranks use the CPU.
"""

import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import measuring
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COLUMNS = 104
LIMIT_S = 120.0
PROMPT = b"\x1b[1;32m$\x1b[0m "


class Terminal:
    """A bash in a pseudo-terminal. ``shown`` contains all bytes that the terminal has shown."""

    def __init__(self, folder: Path) -> None:
        self.shown = b""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = os.environ | {"HOME": str(folder), "PATH": path, "TERM": "xterm-256color"}
        environ.pop("DDPCTL_STATE_DIR", None)
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
            environ["PS1"] = r"\[\e[1;32m\]$\[\e[0m\] "
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "--noediting"], environ)  # noqa: S606
        self._read_to_prompt()

    def run(self, command: str) -> str:
        """Type a command and return what it printed."""
        before = len(self.shown)
        os.write(self._fd, f"{command}\n".encode())
        self._read_to_prompt()
        return self.shown[before : -len(PROMPT)].decode().partition("\n")[2]

    def close(self) -> None:
        os.write(self._fd, b"exit\n")
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def _read_to_prompt(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        start = len(self.shown)
        while not self.shown[start:].endswith(PROMPT):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                sys.exit(f"recording: no prompt within {LIMIT_S:.0f} s: {self.shown[start:].decode()}")
            self.shown += os.read(self._fd, 65536)


def record(folder: Path, epochs: int, steps: int) -> bytes:
    """Run the commands. Return all bytes that the terminal showed."""
    shutil.copy(ROOT / "examples/loop_after.py", folder / "train.py")
    terminal = Terminal(folder)
    script = f"train.py --epochs {epochs} --steps {steps}"
    terminal.run(f"ddpctl launch --nodes 2 --gpus 2 --name night --detach -- {script}")
    checkpoint = folder / ".local/state/ddpctl/runs/night/checkpoints/snapshot.pt"
    measuring.wait_until(checkpoint.exists, "a checkpoint", timeout_s=LIMIT_S)
    status = terminal.run("ddpctl status night")
    pid = re.findall(r"\b3:(\d+)", status)[0]
    terminal.run(f"kill -KILL {pid}    # rank 3, on node 1")
    terminal.run("ddpctl attach night")
    terminal.run("ddpctl report night")
    terminal.close()
    return terminal.shown.removesuffix(b"exit\r\n").removesuffix(PROMPT + b"exit\r\n").removesuffix(PROMPT)


def svg_of(shown: bytes) -> str:
    """Return the picture as SVG. A long line is wrapped at the last column, as in a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in Text.from_ansi(shown.decode().replace("\r\n", "\n")).split("\n"):
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)) or [line]:
            console.print(part, no_wrap=True, overflow="ignore", highlight=False)
    style = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)  # a picture fetches nothing
    svg = console.export_svg(title="two nodes on one machine", code_format=style, unique_id="terminal")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--svg", type=Path, default=ROOT / "docs/pictures/launch.svg")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=900, help="of an epoch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="you-") as folder:
        args.svg.write_text(svg_of(record(Path(folder), args.epochs, args.steps)))


if __name__ == "__main__":
    main()
