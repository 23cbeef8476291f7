"""Renders a shell script that prints the metrics and files of a run's nodes, and parses its output.

The script runs on the machines of the nodes. It needs a POSIX shell, coreutils, and curl, wget or bash.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpctl.command import Output
from ddpwire.run_files import DIAGNOSIS_REQUEST, METRICS_URL

FETCH_S = 5
TIMEOUT_S = 45.0
_MARK = "\x1e"  # before the name of each part; removed from the content of files
_TIME, _METRICS, _FAILURE, _PLACED = "=time", "=metrics", "=failure", "=placed"  # not file names: they begin with "="


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The data that is requested from each node."""

    metrics: bool = True
    files: tuple[str, ...] = ()  # names of files in the node's folder
    max_bytes: int = 2_000_000  # how many bytes at the end of each file
    placed: bool = False  # whether to request the times when a scheduler gave machines to the node
    request: str = ""  # requests a new diagnosis.json, which contains this text


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The data of one node."""

    node: int
    time: float | None = None  # of the node's clock, in seconds since the epoch; None: unknown
    metrics: str = ""  # empty: not available
    files: Mapping[str, str] = field(default_factory=dict)  # name → content, for the files that exist
    placed: tuple[float, ...] = ()  # when a scheduler gave machines to the node, in seconds since the epoch
    failure: str = ""  # why the data is not available, on one line


_FETCH = f"""\
fetch() {{
  if command -v curl >/dev/null; then
    curl -fsS --noproxy '*' --max-time {FETCH_S} "$1"
  elif command -v wget >/dev/null; then
    env -u http_proxy -u HTTP_PROXY wget -q -T {FETCH_S} -O - "$1"
  else
    at=${{1#http://}}
    at=${{at%%/*}}
    timeout {FETCH_S} bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /metrics HTTP/1.0\\r\\n\\r\\n" >&3 &&
      sed "1,/^.\\$/d" <&3' "${{at%:*}}" "${{at##*:}}"
  fi
}}
"""


def probe_script(probe: Probe, folders: Sequence[str], *, placed: str = "") -> str:
    """Return the shell script. ``folders`` are the quoted paths of the nodes' folders.

    ``placed`` is a shell command that prints the times when a scheduler gave machines to the nodes.
    """
    lines = ["PATH=${PATH:-/usr/bin:/bin}", "part() { printf '\\n\\036%s\\n' \"$1\"; }"]
    if probe.metrics:
        lines.append(_FETCH.rstrip())
    files = shlex.join(probe.files)
    for number, folder in enumerate(folders):
        lines += [f"part ={number}", f"part {_TIME}; date +%s.%N"]
        if probe.placed and placed:
            lines.append(f"part {_PLACED}; {placed}")
        lines.append(f"if cd {folder} 2>/dev/null; then")
        if probe.request:
            lines.append(f"  printf %s {shlex.quote(probe.request)} >{DIAGNOSIS_REQUEST}")
        if probe.files:
            lines += [
                f"  for file in {files}; do",
                f'    if [ -f "$file" ]; then part "$file"; tail -c {probe.max_bytes} "$file" | tr -d \'\\036\'; fi',
                "  done",
            ]
        if probe.metrics:
            lines += [
                f"  if [ -s {METRICS_URL} ] && url=$(cat {METRICS_URL}); then",
                f'    part {_METRICS}; fetch "$url" 2>/dev/null || {{ part {_FAILURE}; echo "$url does not answer"; }}',
                "  fi",
            ]
        lines.append("fi")
    return "\n".join([*lines, "exit 0"]) + "\n"


def read_probe(output: Output, nodes: Sequence[int]) -> tuple[ProbeResult, ...]:
    """Parse the output of the script. ``nodes`` are the numbers of the nodes in the order of their folders."""
    if output.returncode:
        return tuple(ProbeResult(node=node, failure=output.last_line()) for node in nodes)
    _, *texts = re.split(rf"^{_MARK}=\d+\n", output.stdout, flags=re.MULTILINE)
    results = tuple(_read_node(node, text) for node, text in zip(nodes, texts, strict=False))
    return results + tuple(ProbeResult(node=node, failure="no answer") for node in nodes[len(results) :])


def _read_node(node: int, text: str) -> ProbeResult:
    parts: dict[str, str] = {}
    for part in text.split(_MARK)[1:]:
        name, _, content = part.partition("\n")
        parts[name] = content.removesuffix("\n")
    failure = parts.pop(_FAILURE, "").strip()
    return ProbeResult(
        node=node,
        time=_seconds(parts.pop(_TIME, "")),
        placed=tuple(time for line in parts.pop(_PLACED, "").splitlines() if (time := _seconds(line)) is not None),
        metrics="" if failure else parts.pop(_METRICS, ""),
        files={name: content for name, content in parts.items() if not name.startswith("=")},
        failure=failure,
    )


def _seconds(text: str) -> float | None:
    """Parse the output of ``date +%s.%N``. The date command of busybox prints no fraction."""
    number = re.match(r"\d+(\.\d+)?", text.strip())
    return float(number[0]) if number else None
