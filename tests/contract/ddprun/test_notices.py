"""The notices of ``notify``: what they say, and what is known of those that were lost."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.messages import assert_names

EVENTS = 'echo "$DDP_NOTICE" >>{}'
TEXTS = 'echo "$DDP_NOTICE_TEXT" >>{}'


def notices(node):
    return [(notice.event, notice.attempt, notice.state) for notice in node.state().notices]


def test_a_restart_and_the_end_are_told_once_and_recorded(runs, tmp_path):
    node = runs.start("act.py", "0=-9", "again=0", options=("--notify", TEXTS.format(tmp_path / "told")))
    assert node.end() == 0
    assert notices(node) == [("restarted", 1, "sent"), ("succeeded", 2, "sent")]
    restarted, succeeded = (tmp_path / "told").read_text().splitlines()
    assert node.outcome().message in succeeded
    assert_names(restarted, "rank 0", "SIGKILL")


def test_of_two_nodes_the_one_that_decides_tells_the_cause(runs, tmp_path):
    nodes = runs.pair("act.py", "1=7", options=("--notify", TEXTS.format(tmp_path / "told")))
    assert [node.end() for node in nodes] == [7, 7]
    assert [notices(node) for node in nodes] == [[("failed", 1, "sent")], []]
    assert nodes[0].outcome().message in (tmp_path / "told").read_text()


def test_a_hang_is_told_and_not_as_another_restart(runs):
    options = ("--nproc-per-node", "2", "--hang-timeout", "1", "--notify", "true")
    node = runs.start("steps.py", "--fail", "1.1=sleep@9", options=options)
    assert node.end() == 0
    assert notices(node) == [("hang", 1, "sent"), ("succeeded", 2, "sent")]


def test_if_node_0_is_lost_node_1_tells_it(runs, tmp_path):
    nodes = runs.pair("act.py", "all=wait", options=("--notify", EVENTS.format(tmp_path / "told")))
    runs.wait_until_ready(*nodes)
    nodes[0].process.kill()
    assert nodes[1].end() == 137
    assert notices(nodes[1]) == [("failed", 1, "sent")]
    assert (tmp_path / "told").read_text() == "failed\n"


@pytest.mark.parametrize(("launcher", "events"), [({}, []), ({"SLURM_JOB_ID": "7"}, ["preempted"])])
def test_a_stop_is_told_only_if_it_may_be_a_preemption(runs, tmp_path, monkeypatch, launcher, events):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    node = runs.start("act.py", "all=wait", options=("--notify", EVENTS.format(tmp_path / "told")))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGTERM)
    assert node.end() == 143
    assert [event for event, _, _ in notices(node)] == events


def test_only_the_chosen_events_are_told(runs, tmp_path):
    options = ("--notify", EVENTS.format(tmp_path / "told"), "--notify-on", "failed,hang")
    node = runs.start("act.py", "0=-9", "again=0", options=options)
    assert node.end() == 0
    assert notices(node) == []


def test_a_command_that_fails_changes_no_exit_code_and_leaves_no_process(runs):
    node = runs.start("act.py", "all=0", options=("--notify", "setsid -f env -i sleep 600; sleep 600 & exit 3"))
    assert node.end() == 0
    (notice,) = node.state().notices
    assert (notice.state, "3" in notice.why) == ("failed", True)
    assert runs.remaining() == []


def test_a_pending_notice_delays_no_outcome(runs):
    node = runs.start("act.py", "0=-9", "again=7", options=("--notify", "sleep 600"))
    runs.until((node.folder / "outcome.json").exists)
    assert node.outcome().code == 7
    assert [state for _, _, state in notices(node)] == ["sending", "sending"]
    node.process.kill()


@pytest.fixture
def hook():
    """A web server that keeps the messages posted to it, as (path, message)."""
    messages = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            messages.append((self.path, json.loads(body)["title"]))
            self.send_response(200 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, messages
        server.shutdown()


def test_an_address_gets_the_notice_and_appears_nowhere(runs, monkeypatch, hook):
    port, messages = hook
    monkeypatch.setenv("GOOD", f"json://127.0.0.1:{port}/good")
    monkeypatch.setenv("BAD", f"json://127.0.0.1:{port}/bad")
    node = runs.start("act.py", "all=0", options=("--notify", "$GOOD", "--notify", "$BAD", "--notify", "$NONE"))
    assert node.end() == 0
    assert sorted({path for path, _ in messages}) == ["/bad", "/good"]
    assert [path for path, _ in messages].count("/good") == 1
    assert {notice.to: notice.state for notice in node.state().notices} == {
        "$GOOD": "sent", "$BAD": "failed", "$NONE": "failed"
    }  # fmt: skip
    files = [path for path in runs.run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if str(port).encode() in path.read_bytes()] == []
