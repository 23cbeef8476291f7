"""torchrun's own line, the same on every node: node 0 has the endpoint's address, the others take numbers."""

import signal


def start(runs, script, *args, host="127.0.0.1", port, nodes="2", options=()):
    """Start a ddprun that is not told which node it is."""
    line = ("--nnodes", nodes, "--rdzv-id", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}")
    return runs.start(script, *args, options=(*line, *options))


def test_a_node_0_that_does_not_come_is_named(runs):
    port = runs.free_port()
    node = start(runs, "act.py", port=port, options=("--join-timeout", "1", "--rdzv-conf", "is_host=0"))
    assert node.end() == 142
    assert f"127.0.0.1:{port}" in node.messages()[-1]


def test_one_node_too_many_is_refused(runs):
    port = runs.free_port()
    pair = [start(runs, "act.py", port=port) for _ in range(2)]
    runs.until(lambda: all((runs.run_dir / f"node-{k}" / f"rank-{k}.log").exists() for k in (0, 1)))
    third = start(runs, "act.py", port=port, options=("--join-timeout", "1"))
    assert third.end() == 78
    assert ["2 nodes" in line for line in third.messages()] == [True, True]
    for node in pair:
        node.process.send_signal(signal.SIGTERM)
        node.end()
