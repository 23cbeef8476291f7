"""The target local: its command lines, what it makes of answers, the script that it renders, and the probe of nodes."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.messages import refused
from tests.unit.ddpctl.answers import OK, Answer, matching, only, perform
from tests.unit.ddpctl.records import run_of

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import Probe, ProbeResult, probe_script, read_probe
from ddpctl.job.launch_plan import CHECK_PYTHON, Plan
from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_status import RunStatus
from ddpctl.targets import LogQuery, StopSignal, Submission
from ddpctl.targets.local import LocalOptions, LocalTarget
from ddpwire.run_files import DIAGNOSIS_REQUEST, NodeState

TARGET = LocalTarget(LocalOptions(python="/venv/bin/python"), {})
JOB = JobSpec(name="digits", nodes="2", gpus=2, command=("train.py", "--lr", "0.1"), env={"A": "b c"})
PLAN = Plan(name="digits-otter", job=JOB, cwd="/project", folder="/runs/digits-otter", checkpoint_dir="/ckpt")
RUN = run_of("digits-otter", job=JOB)
NONE = Output(returncode=127)
PORT = Output(returncode=0, stdout='{"port": 40001}\n')
EIGHT_GPUS = Output(returncode=0, stdout="".join(f"GPU-{index}\n" for index in range(8)))
SLOW = Output(returncode=124, stderr="no answer within 30 s")
START = "-m ddprun --grace"  # a part of the command that starts a node
CHECK = "find_spec"  # of the check of the interpreter
ANSWERS: dict[str, Answer] = {
    "ddprun.nodectl gpus": OK,
    "ddprun.nodectl port": PORT,
}


def submit(
    answers: Mapping[str, Answer] = MappingProxyType({}), *, plan: Plan = PLAN, attached: bool = True
) -> tuple[list[Command], Submission]:
    """What a launch runs, and its submission; ``answers`` are those that differ from a machine without GPUs."""
    return perform(TARGET.submit(plan, attached=attached), ANSWERS | dict(answers))


def test_submit_checks_the_machine_and_starts_every_node() -> None:
    commands, submission = submit()
    assert {shell_line(command) for command in commands if command.mode == "capture"} >= {
        "/venv/bin/python -P -m ddprun.nodectl gpus",
        f"/venv/bin/python -c '{CHECK_PYTHON}'",
        "/venv/bin/python -P -m ddprun.nodectl port",
        "cd /project && test -f train.py",
    }
    assert only(commands, "urandom").argv[-1] == PLAN.folder
    nodes = matching(commands, START)
    assert [shell_line(command) for command in nodes] == [
        "cd /project && A='b c' PET_NNODES=2 PET_NPROC_PER_NODE=2 "
        f"PET_NODE_RANK={node} PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT=40001 DDP_RUN_ID=digits-otter "
        "DDP_RUN_DIR=/runs/digits-otter DDP_CHECKPOINT_DIR=/ckpt "
        "DDP_SECRET_FILE=/runs/digits-otter/store.secret DDP_NODES_HERE=2 "
        "DDP_TARGETS_DIR=/runs/.targets DDP_LAUNCHER=local "
        "DDP_DEVICE=cpu CUDA_VISIBLE_DEVICES='' "
        "/venv/bin/python -P -m ddprun --grace 30 train.py --lr 0.1 "
        f">/runs/digits-otter/node-{node}/node.log 2>&1 &"
        for node in (0, 1)
    ]
    assert {command.tether for command in nodes} == {True}
    assert {command.stdin_inherited for command in nodes} == {False}
    assert replace(submission, note="") == Submission(handle={"port": "40001"})
    assert "4 CPU ranks" in submission.note


@pytest.mark.parametrize(
    ("answers", "kind", "cause"),
    [
        ({CHECK: Output(returncode=1, stderr="no torch in it\n")}, UnavailableError, "no torch in it"),
        ({CHECK: Output(returncode=1, stderr="no ddprun in it\n")}, UnavailableError, "no ddprun in it"),
        ({CHECK: Output(returncode=127, stderr="/venv/bin/python: not found")}, UnavailableError, "'python'"),
        ({CHECK: SLOW}, UnavailableError, "no answer within 30 s"),
        ({"test -f": Output(returncode=1)}, NoInputError, "train.py"),
        ({"urandom": Output(returncode=1, stderr="No space left")}, CannotWriteError, "No space left"),
        (
            {"ddprun.nodectl port": Output(returncode=69, stderr="port 40001 is held by pid 7 (nc -l)\n")},
            UnavailableError,
            "port 40001 is held by pid 7 (nc -l)",
        ),
    ],
    ids=["no-torch", "no-ddprun", "no-python", "no-answer", "no-script", "full-disk", "port-held"],
)
def test_submit_refuses_a_machine_that_cannot_run_the_job(
    answers: dict[str, Output], kind: type[DdpctlError], cause: str
) -> None:
    with refused(kind, cause):
        submit(answers)


def test_a_module_that_is_not_there_and_mig_for_several_ranks_are_refused() -> None:
    with refused(NoInputError, "-m pkg", "/project"):
        submit(
            {"sys.exit(66": Output(returncode=66)}, plan=replace(PLAN, job=replace(JOB, command=("-m", "pkg.train")))
        )
    with refused(ConfigError, "CUDA_VISIBLE_DEVICES", "--device cpu"):
        submit({"ddprun.nodectl gpus": replace(OK, stdout="MIG-1\n" * 4)})


OUTCOME = {"code": 3, "cause": "error", "message": "rank 2 on node 1 exited with 3", "node": 1, "rank": 2}
NODE = {"run": "digits-otter", "node": 0, "pid": 7, "state": "training", "started": 1001.0, "metrics": "http://x"}


def show(*nodes: tuple[bool, dict[str, object] | None, dict[str, object] | None], now: float = 1002.0) -> RunStatus:
    lines = [json.dumps({"dir": "d", "alive": a, "node": n, "outcome": o}) for a, n, o in nodes]
    answer = Output(returncode=0, stdout="\n".join(lines) + "\n")
    commands, (state,) = perform(TARGET.status((RUN,), now=now), {"": answer})
    assert shell_line(only(commands)) == (
        "/venv/bin/python -P -m ddprun.nodectl show /runs/digits-otter/node-0 /runs/digits-otter/node-1"
    )
    return state


def test_the_status_of_a_run_follows_from_its_nodes() -> None:
    both = show((True, NODE, None), (True, {**NODE, "state": "rendezvous"}, None))
    assert (both.state, both.code, [node.alive for node in both.nodes]) == ("rendezvous", None, [True, True])
    assert "2 of 2" in both.message
    again = {**NODE, "attempt": 2, "last_failure": "rank 1 on node 0 was killed by SIGKILL"}
    second = show((True, {**NODE, "attempt": 2}, None), (True, again, None))
    assert ("attempt 2" in second.message, again["last_failure"] in second.message) == (True, True)
    apart = show((True, {**NODE, "resumed_apart": "rank 0 from last.pt"}, None), (True, NODE, None))
    assert "rank 0 from last.pt" in apart.message
    ending = show((True, NODE, None), (False, NODE, OUTCOME))
    assert (ending.state, ending.code) == ("stopping", None)
    ranks = [
        {"rank": rank, "local_rank": rank, "pid": 9, "log": "/l", "state": state}
        for rank, state in enumerate(("running", "stopped", "ended"))
    ]
    stopping = show((True, {**NODE, "state": "stopping", "ranks": ranks}, None), (True, NODE, None))
    assert ("ranks 0 and 1" in stopping.message, "rank 1: stopped by SIGSTOP" in stopping.message) == (True, True)
    failed = show((False, NODE, None), (False, NODE, OUTCOME))
    assert (failed.state, failed.code, failed.message) == ("failed", 3, "rank 2 on node 1 exited with 3")
    stopped = show((False, NODE, {**OUTCOME, "code": 143, "cause": "stopped"}), (False, None, None))
    assert (stopped.state, stopped.code) == ("stopped", 143)
    done = show((False, NODE, {**OUTCOME, "code": 0, "cause": "ok"}), (False, NODE, None))
    assert (done.state, done.code, done.message) == ("succeeded", 0, "rank 2 on node 1 exited with 3")
    restarted = show((False, again, {**OUTCOME, "code": 0, "cause": "ok", "attempt": 2}), (False, NODE, None))
    assert restarted.message == f"{done.message}; attempt 2 was started because {again['last_failure']}"
    assert show((False, None, None), (False, None, None)).state == "starting"
    for lost in (
        show((False, NODE, None), (False, None, None)),
        show((False, None, None), (False, None, None), now=1006),
    ):
        assert (lost.state, lost.code) == ("lost", 137)


def test_logs_ask_for_the_nodes_and_ranks_of_the_query() -> None:
    query = LogQuery(follow=True, nodes=(1,), ranks=(2, 3), tail=5)
    commands, _ = perform(TARGET.logs(RUN, query), {})
    assert shell_line(only(commands)) == (
        "/venv/bin/python -P -m ddprun.nodectl logs --follow --node=1 --rank=2 --rank=3 --tail=5 /runs/digits-otter"
    )
    with pytest.raises(NoInputError, match="digits-otter"):
        perform(TARGET.logs(RUN, LogQuery(ranks=(9,))), {"": Output(returncode=66)})


@pytest.mark.parametrize(
    ("signal", "wait", "wait_s", "gone"),
    [("TERM", True, 35, False), ("INT", False, 0, False), ("KILL", False, 0, True)],
)
def test_stop_signals_every_node_and_says_whether_all_have_ended(
    signal: StopSignal, wait: bool, wait_s: int, gone: bool
) -> None:
    last = "false" if gone else "true"
    answer = Output(returncode=0, stdout=f'{{"alive": false}}\n{{"alive": {last}}}\n')
    commands, ended = perform(TARGET.stop(RUN, signal=signal, wait=wait), {"": answer})
    assert only(commands).timeout_s == wait_s + 45, "the answer comes after the wait"
    assert (shell_line(only(commands)), ended) == (
        f"/venv/bin/python -P -m ddprun.nodectl signal --signal {signal} --wait {wait_s} "
        "/runs/digits-otter/node-0 /runs/digits-otter/node-1",
        gone,
    )


def test_the_rendered_script_starts_every_node_with_its_share(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/bash\n[[ $4 != port ]] || { echo '{\"port\": 40001}'; exit; }\n"
        f'[[ $4 != gpus ]] || exec {sys.executable} "$@"\n'
        'echo "$PET_NODE_RANK $PET_NNODES $PET_MASTER_PORT [$CUDA_VISIBLE_DEVICES] $DDP_JOB_ENV $*" '
        '>"$DDP_RUN_DIR/$PET_NODE_RANK"\n'
        "exit $((PET_NODE_RANK * 3))\n"
    )
    stand_in.chmod(0o755)
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    target, env = (
        LocalTarget(LocalOptions(python=str(stand_in))),
        {"PATH": "/usr/bin:/bin", "RUN_DIR": f"{tmp_path}/run"},
    )
    script = target.render(replace(PLAN, job=replace(JOB, env=JOB.env | gpus)))
    assert "\ntrap : INT " in script, "the nodes get Ctrl-C, too"
    done = subprocess.run(["/bin/bash", "-c", script], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3
    assert str(tmp_path / "run") in done.stderr
    carried = '{"A": "b c"}'
    args = "-P -m ddprun --grace 30 train.py --lr 0.1"
    assert (tmp_path / "run/0").read_text() == f"0 2 40001 [4,5] {carried} {args}\n"
    assert (tmp_path / "run/1").read_text() == f"1 2 40001 [6,7] {carried} {args}\n"

    done = subprocess.run(
        ["/bin/bash", "-c", target.render(PLAN)],
        env={**env, "CUDA_VISIBLE_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 78
    assert ("4 GPUs" in done.stderr, "has 1" in done.stderr) == (True, True)


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
    present, missing = read_probe(Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr), (0, 1))
    assert (present.node, present.metrics.strip(), present.failure) == (0, METRICS.strip(), "")
    assert present.files["history.csv"] == "ddp_loss\n1.0,2\n"
    assert present.files["node.log"] == "time\ntwo three\n"
    assert present.time is not None
    assert (folder / DIAGNOSIS_REQUEST).read_text() == "word 7"
    assert (missing.node, missing.metrics, missing.files, missing.failure) == (1, "", {}, "")


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
    commands, results = perform(TARGET.probe(RUN, probe), {"": Output(returncode=1)})
    command = only(commands)
    folders = [f"/runs/digits-otter/node-{node}" for node in range(2)]
    assert (command.argv, command.stdin) == (("/bin/sh",), probe_script(probe, folders))
    assert [result.node for result in results] == [0, 1]
