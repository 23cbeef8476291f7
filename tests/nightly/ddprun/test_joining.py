"""torchrun's own line, the same on every node: node 0 has the endpoint's address, the others take numbers."""

import signal
import socket

import pytest
from tests.contract.ddprun.test_meeting import start

from ddprun.system import network
from ddpwire.run_files import read_outcome


@pytest.mark.parametrize("host", ["127.0.0.1", socket.gethostname()])
def test_two_nodes_meet_by_the_same_line(runs, host):
    port = runs.free_port()
    nodes = [start(runs, "gloo.py", host=host, port=port, options=("--nproc-per-node", "2")) for _ in range(2)]
    assert [node.end() for node in nodes] == [0, 0]
    lines = sorted(line for node in nodes for line in node.stdout.read_text().splitlines())
    places = ["node0 rank0", "node0 rank1", "node1 rank2", "node1 rank3"]
    assert lines == [f"[{place}] world 4: 4" for place in places]


def test_a_port_serves_one_start_after_the_other_and_numbers_outlast_restarts(runs):
    port = runs.free_port()
    for _ in range(2):
        nodes = [start(runs, "gloo.py", "--fail", "1:-9", port=port, options=("--max-restarts", "1")) for _ in range(2)]
        assert [node.end() for node in nodes] == [0, 0]
        lines = sorted(line for node in nodes for line in node.stdout.read_text().splitlines())
        assert lines == ["[node0 rank0] world 2: 2", "[node1 rank1] world 2: 2"]
        for node in (0, 1):
            outcome = read_outcome((runs.run_dir / f"node-{node}" / "outcome.json").read_text())
            assert (outcome.code, outcome.attempt) == (0, 2)


def test_a_job_of_one_to_two_nodes_begins_with_the_one_that_came(runs):
    node = start(runs, "act.py", "all=0", port=runs.free_port(), nodes="1:2", options=("--join-timeout", "1"))
    assert node.end() == 0
    assert (runs.run_dir / "node-0" / "outcome.json").exists()


def test_a_node_0_that_ends_before_it_serves_the_store_is_replaced(runs):
    port = runs.free_port()
    first = start(runs, "act.py", port=port)
    runs.until(lambda: (runs.run_dir / "node-0" / "node.json").exists())
    first.process.send_signal(signal.SIGSTOP)
    second = start(runs, "act.py", "all=0", port=port, nodes="1:2", options=("--join-timeout", "10"))
    runs.until(lambda: any("waiting for node 0" in line for line in second.messages()))
    first.process.kill()
    assert second.end() == 0
    assert read_outcome((runs.run_dir / "node-0" / "outcome.json").read_text()).code == 0


def test_a_node_of_another_run_takes_no_number(runs):
    port = runs.free_port()
    first = start(runs, "act.py", port=port, options=("--join-timeout", "15"))
    runs.until(lambda: (runs.run_dir / "node-0" / "node.json").exists())
    other = start(runs, "act.py", port=port, options=("--rdzv-id", "2", "--join-timeout", "30"))
    assert other.end() == 78
    assert "'2'" in other.messages()[-1]
    assert "'1'" in other.messages()[-1]
    first.process.send_signal(signal.SIGTERM)
    first.end()


def test_another_program_on_the_port_is_named(runs):
    with network.bind("127.0.0.1", 0, listen=True) as listener:
        port = listener.getsockname()[1]
        node = start(runs, "act.py", port=port, options=("--join-timeout", "10"))
        assert node.end() == 69
    assert f"127.0.0.1:{port}" in node.messages()[-1]
