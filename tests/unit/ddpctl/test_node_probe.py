"""A look into nodes: the shell's text, run by real shells against a real endpoint, and every target's command lines."""

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl import test_local
from tests.unit.ddpctl.answers import only, perform

from ddpctl.command import Output
from ddpctl.execution.node_probe import Probe, ProbeResult, probe_script, read_probe
from ddpwire.run_files import DIAGNOSIS_REQUEST, NodeState

METRICS = "# TYPE ddp_loss gauge\nddp_loss 0.5\n"
PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def url() -> Iterator[str]:
    """An endpoint as ddprun's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()


def node(folder: Path, url: str) -> Path:
    folder.mkdir(parents=True)
    NodeState(run="night", node=0, pid=1, state="training", started=0.0, metrics=url).write(folder)
    (folder / "history.csv").write_text("time,ddp_loss\n1.0,2\n")
    (folder / "node.log").write_text("one\n\x1e=time\ntwo three\n")
    return folder


@pytest.mark.parametrize("fetcher", ["curl", "wget", "bash"])
def test_a_shell_sees_files_and_metrics(fetcher: str, url: str, tmp_path: Path) -> None:
    """By whichever program there is; what a log says is never taken for an answer."""
    programs = ("sh", "cat", "date", "sed", "tail", "tr", "env", "timeout", fetcher)
    if fetcher not in ("bash",) and not shutil.which(fetcher, path=PATH):
        pytest.skip(f"needs {fetcher}")
    (tmp_path / "bin").mkdir()
    for program in programs:
        (tmp_path / "bin" / program).symlink_to(shutil.which(program, path=PATH) or program)
    folder = node(tmp_path / "run" / "node 0", url)
    probe = Probe(files=("history.csv", "node.log", "none"), max_bytes=15, request="word 7")
    text = probe_script(probe, [f"'{folder}'", "/nowhere"])
    environ = {"PATH": f"{tmp_path}/bin", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(["/bin/sh"], input=text, env=environ, capture_output=True, text=True, timeout=30)
    there, nowhere = read_probe(Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr), (0, 1))
    assert (there.node, there.metrics.strip(), there.failure) == (0, METRICS.strip(), "")
    assert there.files["history.csv"] == "ddp_loss\n1.0,2\n"
    assert there.files["node.log"] == "time\ntwo three\n"
    assert there.time is not None
    assert (folder / DIAGNOSIS_REQUEST).read_text() == "word 7"
    assert (nowhere.node, nowhere.metrics, nowhere.files, nowhere.failure) == (1, "", {}, "")


def test_a_machine_that_cannot_be_asked() -> None:
    assert read_probe(Output(returncode=255, stderr="box1: no route\n"), (0, 1)) == (
        ProbeResult(node=0, failure="box1: no route"),
        ProbeResult(node=1, failure="box1: no route"),
    )
    (mute,) = read_probe(Output(returncode=0, stdout="motd\n"), (3,))
    assert replace(mute, failure="") == ProbeResult(node=3)
    assert mute.failure


def test_local_asks_one_shell_for_all_nodes() -> None:
    probe = Probe(files=("a",), max_bytes=9, request="7")
    asked, results = perform(test_local.TARGET.probe(test_local.RUN, probe), {"": Output(returncode=1)})
    command = only(asked)
    folders = [f"/runs/digits-otter/node-{node}" for node in range(2)]
    assert (command.argv, command.stdin) == (("/bin/sh",), probe_script(probe, folders))
    assert [result.node for result in results] == [0, 1]
