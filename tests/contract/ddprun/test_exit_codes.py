"""The exit code and the one outcome of both nodes, also of one that is stopped, lost or replaced."""

import json
import signal

import pytest

from ddpwire.run_files import Outcome, diagnosis_file


def ended(*nodes):
    """The code, the cause, the node and the rank of the one outcome of both nodes."""
    codes = {node.end() for node in nodes}
    outcomes = {node.outcome() for node in nodes}
    assert (len(codes), len(outcomes)) == (1, 1), (codes, outcomes)
    outcome = outcomes.pop()
    assert outcome.code == codes.pop()
    return outcome.code, outcome.cause, outcome.node, outcome.rank


@pytest.mark.parametrize(("code", "node"), [(3, 0), (142, 1)])
def test_the_exit_code_of_a_script_is_that_of_both_nodes(runs, code, node):
    assert ended(*runs.pair("act.py", f"{node}={code}")) == (code, "error", node, node)


@pytest.mark.parametrize(("arguments", "code", "of_pod"), [("0=3", 3, 3), ("0=200", 200, 75)])
def test_in_a_pod_a_hopeless_run_ends_below_128(runs, arguments, code, of_pod):
    """A PyTorchJob replaces a pod that ends with 128 or more, as often as it takes."""
    node = runs.start("act.py", arguments, env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (node.end(), node.outcome().code) == (of_pod, code)
    assert (runs.run_dir / "checkpoints").is_dir()  # DDP_CHECKPOINT_DIR, which the target did not create


@pytest.mark.parametrize("program", [["gone.py"], ["-m", "gone_entirely.part"]], ids=["script", "module"])
def test_a_missing_script_is_66_before_torch_is_imported(runs, program, tmp_path):
    node = runs.start("act.py", options=tuple(program), cwd=tmp_path)
    assert node.end() == 66
    assert (node.outcome().code, node.outcome().cause) == (66, "config")
    assert program[-1] in node.outcome().message
    assert node.stderr.read_text() == f"ddprun: {node.outcome().message}\n"  # torch was not imported


def test_a_script_that_one_node_lacks_ends_both_nodes_at_once(runs, tmp_path):
    folders = [tmp_path / "with", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "with/only_here.py").write_text("")
    port = runs.free_port()
    options = ("--join-timeout", "200", "-m", "only_here")
    nodes = [
        runs.start("act.py", node=number, nodes="2", port=port, options=options, cwd=folder)
        for number, folder in enumerate(folders)
    ]
    assert [node.end() for node in nodes] == [66, 66]


LEFT_ALONE = """
import os, sys, time
while os.environ["RANK"] == "0":
    with open(os.environ["DDP_EVENTS_FILE"]) as events:
        if '"rank_exited"' in events.read():
            raise RuntimeError("Connection closed by peer")
    time.sleep(0.02)
"""


def test_a_rank_that_exits_with_0_before_another_fails_is_named(runs, tmp_path):
    (tmp_path / "script.py").write_text(LEFT_ALONE)
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"))
    assert node.end() == 1
    assert node.facts() == Outcome(code=1, cause="error", message="", node=0, rank=0)
    assert "rank 1 had exited with 0" in node.outcome().message
    assert "RuntimeError: Connection closed by peer" in node.outcome().message


WAITED = """
import os, time
def tokenize():
    open("begun", "w").close()
    time.sleep(600)
if os.environ["RANK"] == "0":
    tokenize()
while not os.path.exists("begun"):
    time.sleep(0.02)
raise RuntimeError("Timed out waiting 12000ms for recv operation to complete")
"""


def test_after_a_timeout_the_stacks_of_the_other_ranks_are_kept(runs, tmp_path):
    (tmp_path / "script.py").write_text(WAITED)
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"), cwd=tmp_path)
    assert (node.end(), node.outcome().rank) == (1, 1)
    (rank, _) = json.loads((node.folder / diagnosis_file(1)).read_text())["ranks"]
    *_, function = rank["samples"][-1]["threads"][0][0]
    assert function == "tokenize"


@pytest.mark.parametrize(("deed", "option", "code"), [("0=3", "--max-restarts", 0), ("0=66", "--max-restarts", 66)])
def test_max_restarts_is_torchruns(runs, deed, option, code):
    node = runs.start("act.py", deed, "again=0", options=(option, "1"))
    assert node.end() == code
    assert node.outcome().attempt == (1 if code else 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_of_one_node_ends_both_with_its_code(runs, number):
    """Also a Ctrl-C: ddpctl signals each host by itself, so the nodes get it at different times."""
    nodes = runs.pair("act.py", "all=save")
    runs.wait_until_ready(*nodes)
    nodes[1].process.send_signal(number)
    assert [node.end() for node in nodes] == [128 + number] * 2
    retry, first = number != signal.SIGINT, nodes[0]
    assert first.facts() == Outcome(code=128 + number, cause="stopped", message="", node=1, rank=1, retry=retry)
    assert nodes[1].outcome() == first.outcome()
    assert number.name in first.outcome().message
    of_peer = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    assert [node.log(rank) for rank, node in enumerate(nodes)] == [
        f"ready\nsaved on {name}\n" for name in (of_peer, number.name)
    ]


def test_a_stop_of_a_node_that_is_replaced_ends_it_alone(runs, monkeypatch):
    """As when a pod is deleted; then the job is."""
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    first, second = runs.pair("act.py", "all=save")
    runs.wait_until_ready(first, second)
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    assert second.facts() == Outcome(code=143, cause="stopped", message="", node=1, retry=True)
    assert "SIGTERM" in second.outcome().message
    runs.until(lambda: first.state().state == "rendezvous")
    assert first.log(0) == "ready\nsaved on SIGTERM\n"
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    assert runs.remaining() == []


def test_a_lost_node_is_named_by_the_other(runs):
    first, second = runs.pair("act.py", "all=family", options=("--max-restarts", "0"))
    runs.wait_until_ready(first, second)
    second.process.kill()
    assert first.end() == 137
    assert first.facts() == Outcome(code=137, cause="node_lost", message="", node=1, retry=True)
    assert runs.remaining() == []


def test_a_new_pod_waits_for_the_folder_of_a_pod_that_still_runs(runs, monkeypatch):
    """Its machine is cut off from Kubernetes, and the run's folder is on a claim."""
    monkeypatch.setenv("DDP_NODE_REPLACED", "1")
    port = runs.free_port()
    first, second = runs.pair("act.py", "all=save", port=port)
    runs.wait_until_ready(first, second)
    new = runs.start("act.py", "all=save", node=1, nodes="2", port=port)
    runs.until(lambda: "another ddprun uses" in new.stderr.read_text())
    assert [node.process.poll() for node in (first, second, new)] == [None] * 3
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143
    runs.until(lambda: new.state().pid == new.process.pid and new.state().state == "training")
    stop(first, new)


def stop(*nodes):
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert {node.process.wait(60) for node in nodes} == {143}


def test_an_error_that_a_rank_reported_earlier_is_not_the_cause_of_its_death_by_a_signal(runs, tmp_path):
    report = "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": \"caught\"}')\n"
    (tmp_path / "report.py").write_text(f"{report}os.kill(os.getpid(), 9)\n")
    node = runs.start(str(tmp_path / "report.py"), options=("--nproc-per-node", "1", "--max-restarts", "0"))
    assert ended(node) == (137, "killed", 0, 0)
    assert "caught" not in node.outcome().message
