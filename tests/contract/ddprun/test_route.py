"""The route to node 0: every failure of the network names a host, an address, a port."""

import os


def test_an_error_of_the_route_is_reported_before_torch_is_imported(runs, tmp_path):
    (tmp_path / "torch.py").write_text("import os; os._exit(99)\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    for master, code in (("nobody.invalid", 69), ("127.0.0.1", 99)):
        node = runs.start(
            "act.py", node=1, nodes="2", port=1, options=("--master-addr", master), env={"PYTHONPATH": path}
        )
        assert node.end() == code
