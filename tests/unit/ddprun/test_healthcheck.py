"""The image's health check: it finds the node by its lock, and asks its metrics."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from ddprun import healthcheck
from ddpwire.run_files import NodeState


def node(folder: Path, metrics: str | None) -> Path:
    folder.mkdir(parents=True)
    NodeState(run="x", node=0, pid=1, state="training", started=0.0, metrics=metrics).write(folder)
    return folder


def test_a_node_is_found_by_who_holds_its_lock(tmp_path: Path) -> None:
    for pid, target in (("7", "/runs/x/node-1/ddprun.lock"), ("8", "/runs/x/node-1/ddprun.lock"), ("9", "/dev/null")):
        descriptors = tmp_path / "proc" / pid / "fd"
        descriptors.mkdir(parents=True)
        (descriptors / "5").symlink_to(target)
    (tmp_path / "proc" / "self").symlink_to("7")
    assert healthcheck.locked_nodes(tmp_path / "proc") == {Path("/runs/x/node-1")}


def test_the_lock_of_this_process_is_found(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    with (tmp_path / "node-0" / "ddprun.lock").open("w"):
        assert tmp_path / "node-0" in healthcheck.locked_nodes(Path("/proc"))
    assert tmp_path / "node-0" not in healthcheck.locked_nodes(Path("/proc"))


def test_a_node_that_starts_and_one_that_answers_are_healthy(tmp_path: Path) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    assert healthcheck.find_problem(node(tmp_path / "node-0", None)) == ""
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answering = node(tmp_path / "node-1", f"http://127.0.0.1:{server.server_port}/metrics")
    try:
        assert healthcheck.find_problem(answering) == ""
    finally:
        server.shutdown()
        server.server_close()
    assert healthcheck.find_problem(answering) == "node-1: <urlopen error [Errno 111] Connection refused>"


def test_a_node_whose_record_is_torn_is_not_healthy(tmp_path: Path) -> None:
    broken = tmp_path / "node-0"
    broken.mkdir()
    (broken / "node.json").write_text("{")
    assert healthcheck.find_problem(broken).startswith("node-0: ")
