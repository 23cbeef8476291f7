"""Several ranks of which none joins a process group are copies of one training: who is told, and who is not."""

GROUP = "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\nd.destroy_process_group()\n"


def run(runs, tmp_path, text, *options, local_world_size="2"):
    (tmp_path / "group.py").write_text(GROUP)
    (tmp_path / "script.py").write_text(text)
    node = runs.start(
        str(tmp_path / "script.py"),
        str(tmp_path / "group.py"),
        options=("--nproc-per-node", local_world_size, *options),
    )
    assert node.end() == 0
    return node


def test_copies_are_named(runs, tmp_path):
    node = run(runs, tmp_path, "print(1)")
    message = node.outcome().message
    assert node.messages()[-1] == f"[node0] {message}"
    assert "2 ranks" in message
    assert "init_process_group" in message
