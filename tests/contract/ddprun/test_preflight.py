"""The nodes meet: what differs is refused with both values, clocks are compared, --check-only shows it all."""

import psutil


def loopback():
    own = psutil.net_if_addrs().items()
    return next(name for name, owned in own if "127.0.0.1" in [one.address for one in owned])


def test_nodes_that_do_not_match_are_refused_on_both_with_both_values(runs):
    port = runs.free_port()
    second = runs.start(
        "act.py", node=1, nodes="2", port=port, env={"DDP_IMAGE": "train:1"}, options=("--nproc-per-node", "2")
    )
    first = runs.start("act.py", node=0, nodes="2", port=port, env={"DDP_IMAGE": "train:2"})
    assert (first.end(), second.end()) == (78, 78)
    assert (first.outcome().cause, second.outcome().cause) == ("config", "config")
    assert first.outcome().message == second.outcome().message
    for value in ("train:1 on node 1", "train:2 on node 0", "2 on node 1", "1 on node 0"):
        assert value in first.outcome().message


def test_check_only_prints_what_it_found_and_starts_nothing(runs):
    port = runs.free_port()
    options = ("--check-only",)
    second = runs.start("act.py", node=1, nodes="2", port=port, options=options)
    first = runs.start("act.py", node=0, nodes="2", port=port, options=options)
    assert (first.end(), second.end()) == (0, 0)
    rows = [line.split(maxsplit=2) for line in first.stdout.read_text().splitlines()]
    assert [row[:2] for row in rows] == [
        ["step", "result"],
        *([step, "ok"] for step in ("resolve", "address", "port")),
        ["limits", rows[4][1]],  # this machine's
        *([step, "ok"] for step in ("compare", "meet")),
    ]
    assert [rows[1][2], rows[2][2], rows[3][2]] == [
        "127.0.0.1",
        f"127.0.0.1 on {loopback()}",
        f"{port} on 127.0.0.1 is free",
    ]
    assert rows[-1][2] == "2 of 2 nodes"
    rows = [line.split(maxsplit=2) for line in second.stdout.read_text().splitlines()]
    assert [row[0] for row in rows[1:]] == ["resolve", "address", "limits", "reach", "compare", "clock", "meet"]
    assert rows[4] == ["reach", "ok", f"127.0.0.1:{port} answers"]
    assert first.log(0) == second.log(1) == ""
