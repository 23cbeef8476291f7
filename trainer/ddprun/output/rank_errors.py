"""The error that ended a rank, in one line: from the rank's error file or, without one, from the end of its log."""

import re
from collections.abc import Sequence
from pathlib import Path

from ddpwire.run_files import rank_error, rank_log, read_end, read_error

MAX_ERROR_CHARS = 200
HEADER = "Traceback (most recent call last):"
# A traceback's header, even after a progress bar, or the end of rich's box; not the header of a nested exception.
TRACEBACK = re.compile(r"(?!Original | +\|).*" + re.escape(HEADER) + r"$|╰─+╯$")
SPAWNED = re.compile(r"-- Process \d+ terminated with the following error:$")  # torch.multiprocessing.spawn
EXCEPTION = re.compile(r"(  \| )?[^\W\d][\w.]*(: |:?$)")
NO_STDIN = re.compile(r"(bdb\.)?BdbQuit\b|EOFError: EOF when reading a line")  # the errors of breakpoint() and input()
OF_RANK = re.compile(re.escape(HEADER) + r"( \(RANK \d+\))?$")  # torch.distributed.checkpoint adds the rank
# What a rank sees if a DataLoader worker ends while it passes on a tensor: the other end of a socket that has no name.
WORKER_GONE = re.compile(r"(FileNotFoundError: \[Errno 2\]|Connection\w+Error: \[Errno \d+\]) [\w ]+$|EOFError$")
WORKER_ENDED = re.compile(r"DataLoader worker \(pid [^)]*\) (exited unexpectedly[^.]*|is killed by signal: \w+)")
USAGE_ERROR = re.compile(r"(\S+: e|E)rror: ")  # of argparse and of click, which exit with 2
SYNTAX_ERROR = re.compile(r"(SyntaxError|IndentationError|TabError): ")


def last_lines(path: Path, num_lines: int, start: int) -> list[str]:
    """Return the last lines of a log, without those before byte ``start``, or an empty list if it is unreadable."""
    try:
        return read_end(path, max(0, min(1 << 14, path.stat().st_size - start))).splitlines()[-num_lines:]
    except OSError:
        return []


def last_error(node_dir: Path, rank: int, status: int, start: int = 0, in_order: bool = True) -> str:
    """Return the error that ended a rank with ``status``, in one line, or an empty string if it is unknown.

    The error is in the rank's error file. A rank that was executed and does not use torch's ``record`` has no such
    file. The file contains no error if the script called sys.exit with a number. If no error is found there, and the
    rank exited with 1 (as after an uncaught exception), the error is the last traceback in the log. If it exited with
    2, the error is that of the parser of its arguments, in the log's last line. Only the log after byte ``start`` is
    searched, because the attempt begins there.

    If lines follow the traceback, or the script called sys.exit, the script may have caught the exception. Then the
    text says that the error comes from the log. The log is used only if its lines are ``in_order``, which means that
    they are in the order in which the rank wrote them.
    """
    message = read_error(node_dir / rank_error(rank))
    if message:
        error = first_line(message.splitlines())
        end = "\n".join(last_lines(node_dir / rank_log(rank), 200, start)) if WORKER_GONE.match(error) else ""
        worker = WORKER_ENDED.search(end)  # torch's handler reports it when the rank exits
        return _shorten(f"{worker[0]}: {error}" if worker else error)
    if status not in (1, 2) or not in_order:
        return ""
    log = last_lines(node_dir / rank_log(rank), 200, start)
    lines = [re.sub(r"^(\[rank\d+\]: ?)+", "", line) for line in log]  # torch's prefix
    if status == 2:
        last_line = next((line for line in reversed(lines) if line.strip()), "")
        return _shorten(last_line) if USAGE_ERROR.match(last_line) else ""
    start_of_error = find_exception(lines)
    if start_of_error is None:
        return ""
    error = first_line(lines[start_of_error:])
    later = [line for line in lines[start_of_error + 1 :] if line.strip() and not line[0].isspace()]
    if len(later) > 20:  # more than a hint, or the output of atexit: the script has continued
        return ""
    ended_it = message is None and not later
    return _shorten(error if ended_it else f"the last traceback in its log: {error}")


def find_exception(lines: Sequence[str]) -> int | None:
    """Return the index of the line that names the exception of a log's last traceback, or None."""
    for start in range(len(lines) - 1, -1, -1):
        if TRACEBACK.match(lines[start]):
            after = range(start + 1, len(lines))
            return next((number for number in after if EXCEPTION.match(lines[number])), None)
        if SYNTAX_ERROR.match(lines[start]) and start and lines[start - 1].startswith("    "):
            return start  # an error in the script itself, for which Python prints no header
    return None


def first_line(lines: Sequence[str]) -> str:
    """Return an error's message in one line: its first line, and the text that explains it.

    If the first line ends with a colon, the next line is added. The error of a DataLoader worker contains the worker's
    traceback, and the error in this traceback is added. If torch.multiprocessing.spawn reports the error of a process,
    only that error is returned. The text after NCCL's "Last error:" is added.
    """
    texts = [line for line in (re.sub(r"^[ |+]*", "", line).strip() for line in lines) if line]
    if not texts:
        return ""
    header = next((number for number, line in enumerate(lines) if OF_RANK.search(line)), len(lines))
    inner = next((number for number in range(header, len(lines)) if EXCEPTION.match(lines[number])), None)
    if inner is not None and any(SPAWNED.search(text) for text in texts[:2]):
        return first_line(lines[inner:])
    if inner is not None:
        return f"{texts[0].rstrip('.:')}: {first_line(lines[inner:])}"
    first = f"{texts[0]} {texts[1]}" if texts[0].endswith(":") and len(texts) > 1 else texts[0]
    if "Last error:" in texts[1:-1]:
        first = f"{first}: {texts[texts.index('Last error:') + 1]}"
    return first


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 1]}…"
