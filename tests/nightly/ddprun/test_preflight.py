"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import os
import re
import socket


def test_another_argument_is_a_warning(runs):
    port = runs.free_port()
    second = runs.start("act.py", "all=0", "1=0", node=1, nodes="2", port=port)
    first = runs.start("act.py", "all=0", "0=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    assert ["argument 2" in line for line in second.messages()] == [True, False]


def test_clocks_a_minute_apart_are_a_warning(runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.time = lambda real=time.time: real() - 60\n")
    port = runs.free_port()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    second = runs.start("act.py", "all=0", node=1, nodes="2", port=port, env={"PYTHONPATH": path})
    first = runs.start("act.py", "all=0", node=0, nodes="2", port=port)
    assert (first.end(), second.end()) == (0, 0)
    lines = "\n".join(second.messages())
    (seconds,) = re.findall(r"([0-9.]+) s ", lines)
    assert 40 < float(seconds) < 80  # half of the round trip's time is the error, on a busy machine
    assert "node-1" in lines


def test_another_server_on_node_0s_port_is_no_store(runs):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        node = runs.start("act.py", node=1, nodes="2", port=port)
        assert node.end() == 69
    assert node.outcome().cause == "unavailable"
    assert f"127.0.0.1:{port}" in node.outcome().message


def test_check_only_fails_with_the_message_and_the_code(runs):
    node = runs.start("act.py", nodes="2", port=runs.free_port(), options=("--check-only", "--join-timeout", "0.5"))
    assert node.end() == 142
    *row, message = node.stdout.read_text().splitlines()[-1].split(maxsplit=2)
    assert row == ["meet", "failed"]
    assert "node 1 of 2" in message
