"""The target ssh: whole command lines and scripts against recorded answers, and what it says of each answer."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpctl.command import Command, Host, Output, T, Verb
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.plan import Plan
from ddpctl.run import Run
from ddpctl.spec import JobSpec
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import SshHost, SshOptions, SshTarget, scripts

HOSTS = (SshHost(address="box1", peer="10.0.0.1"), SshHost(address="box2", user="alice", port=2222))
OPTIONS = SshOptions(hosts=HOSTS)
BARE = SshOptions(hosts=HOSTS, runtime="none", python="~/venv/bin/python")
JOB = JobSpec(name="digits", nodes="2", gpus=2, env={"A": "b c"}, image="ddpctl:1", mounts=("/data:/data:ro",))
PLAN = Plan(run="night", job=JOB, cwd="/project", run_dir="/s/night", checkpoint_dir="/s/night/checkpoints")
ID = "sha256:" + "a" * 64
OK = Output(returncode=0)
GPUS = ("GPU-0", "GPU-1", "GPU-2")
RUN = Run(
    name="night",
    created=1000.0,
    target="boxes",
    kind="ssh",
    options={},
    job=JOB,
    cwd="/project",
    folder="/s/night",
    checkpoint_dir="box1:~/.ddpctl/runs/night/checkpoints",
    version="0.1.0",
)


def inspected(image_id: str = ID, digests: tuple[str, ...] = ()) -> str:
    said = {"Id": image_id, "RepoDigests": list(digests), "RootFS": {"Layers": []}, "Size": 1, "Created": "",
            "Os": "linux", "Architecture": "amd64"}  # fmt: skip
    return json.dumps([said])


def facts(number: int = 1, **words: str | tuple[str, ...] | None) -> Output:
    """What a host that is ready says, with other words laid over it."""
    said: dict[str, Any] = {
        "id": "1000:1000",
        "home": "/home/alice",
        "ssh": f"10.0.0.9 4000 10.0.0.{number} 22",
        "writable": "yes",
        "disk": "104857600",
        "flock": "yes",
        "engine": "28.2.2",
        "runtimes": '{"nvidia":{}}',
        "asked": "ddpctl:1",
        "image": inspected(),
        "end": "yes",
        **words,
    }
    lines = [
        f"{word} {one}"
        for word, value in said.items()
        if value is not None
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    return Output(returncode=0, stdout="\n".join(lines) + "\n")


CLOCKS = tuple(Output(returncode=0, stdout=f"{1000 + ahead}.5\n") for ahead in (0, 0, 0))
PORT = (Output(returncode=0, stdout='{"port": 61000}\n'),)


def play(verb: Verb[T], answers: Iterable[tuple[Output, ...]]) -> tuple[list[tuple[Command, ...]], T]:
    asked = [next(verb)]
    try:
        for answer in answers:
            asked.append(verb.send(answer))
    except StopIteration as stop:
        return asked, stop.value
    raise AssertionError(f"it wants another answer, to {asked[-1]}")


def submit(*said: Output, options: SshOptions = OPTIONS, plan: Plan = PLAN) -> tuple[list[tuple[Command, ...]], Any]:
    return play(SshTarget(options).submit(plan, attached=True), [said, CLOCKS, PORT, (OK, OK)])


def test_a_container_on_every_host() -> None:
    asked, submission = submit(facts(1, gpu=GPUS, busy=("GPU-1",)), facts(2, gpu=GPUS))
    looks, clocks, port, starts = asked
    assert [(command.argv, command.host, command.probe) for command in looks] == [
        (("/bin/sh",), Host(address="box1"), True),
        (("/bin/sh",), Host(address="box2", user="alice", port=2222), True),
    ]
    assert [command.argv for command in clocks] == [("date", "+%s.%N")] * 3
    assert port[0].argv == (
        "docker", "run", "--rm", "--network=host", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--read-only", "--tmpfs=/tmp:rw,exec,nosuid,nodev", "--entrypoint=python3", ID, "-P", "-m", "ddprun.nodectl",
        "port", "--host", "10.0.0.1",
    )  # fmt: skip
    assert (
        starts[0].stdin
        == f"""\
set -eu
mkdir -p "$HOME"/.ddpctl/runs/night/node-0 "$HOME"/.ddpctl/runs/night/checkpoints
exec 9>>"$HOME"/.ddpctl/lock-"$(uname -n)"
flock -w 10 9 || {{ echo "another launch is starting a run there" >&2; exit 75; }}
other=$(docker ps --filter label=ddpctl.run --format '{{{{.Label "ddpctl.run"}}}}' \\
| grep -vxF night | head -n 1 || true)
if [ -n "$other" ]; then echo "the run $other is there" >&2; exit 75; fi
env=$(umask 077 && mktemp "$HOME"/.ddpctl/runs/night/env.XXXXXX)
trap 'rm -f "$env"' EXIT
cat >"$env" <<'END_OF_FILE'
HOME=/tmp
USER=ddp
A=b c
DDP_DEVICE=cuda
PET_NNODES=2
PET_NPROC_PER_NODE=2
PET_NODE_RANK=0
PET_MASTER_ADDR=10.0.0.1
PET_MASTER_PORT=61000
DDP_RUN_ID=night
DDP_RUN_DIR=/runs/night
DDP_CHECKPOINT_DIR=/runs/night/checkpoints
DDP_IMAGE={ID}
END_OF_FILE
docker run --detach --rm --init --name=ddpctl-night-0 --label=ddpctl.run=night --label=ddpctl.node=0 --network=host \
--user=1000:1000 "--env-file=$env" --shm-size=8589934592 \
--cap-drop=ALL --security-opt=no-new-privileges --read-only --tmpfs=/tmp:rw,exec,nosuid,nodev \
--volume=/home/alice/.ddpctl/runs/night:/runs/night --volume=/data:/data:ro '--gpus="device=GPU-0,GPU-2"' \
--ulimit=memlock=-1:-1 \
--entrypoint=/bin/sh {ID} -c 'exec ddprun "$@" >>"$DDP_RUN_DIR/node-$PET_NODE_RANK/node.log" 2>&1' ddprun \
--run-id night --grace 30 -m ddptrain >/dev/null 9>&-
"""
    )
    assert "PET_NODE_RANK=1\n" in (starts[1].stdin or "")
    assert '--gpus="device=GPU-0,GPU-1"' in (starts[1].stdin or "")
    assert submission.handle == {"port": "61000", "address": "10.0.0.1", "logs": "ddpctl logs night"}
    assert submission.checkpoint_dir == "box1:~/.ddpctl/runs/night/checkpoints"
    assert submission.table == (
        "HOST  SSH  DOCKER  IMAGE         GPUS FREE  DISK FREE  CLOCK   STATE",
        "box1  yes  28.2.2  aaaaaaaaaaaa  2 of 3     100 GiB    +0.0 s  ready",
        "box2  yes  28.2.2  aaaaaaaaaaaa  3 of 3     100 GiB    +0.0 s  ready",
    )


def test_root_gives_the_folder_to_the_images_user() -> None:
    asked, _ = submit(*(facts(number, id="0:0", home="/root") for number in (1, 2)))
    text = asked[-1][0].stdin or ""
    assert 'chown -R 10001:10001 "$HOME"/.ddpctl/runs/night\n' in text
    assert "--user=10001:10001 " in text


def test_a_process_where_there_is_no_container() -> None:
    asked, _ = submit(*(facts(number, image=None, engine="Python 3.11.2") for number in (1, 2)), options=BARE)
    assert asked[2][0].stdin == '"$HOME"/venv/bin/python -P -m ddprun.nodectl port --host 10.0.0.1\n'
    assert (
        asked[3][1].stdin
        == """\
set -eu
mkdir -p "$HOME"/.ddpctl/runs/night/node-1 "$HOME"/.ddpctl/runs/night/checkpoints
exec 9>>"$HOME"/.ddpctl/lock-"$(uname -n)"
flock -n 9 || { echo "the run $(cat "$HOME"/.ddpctl/lock-"$(uname -n)") is there" >&2; exit 75; }
echo night >"$HOME"/.ddpctl/lock-"$(uname -n)"
cd "$HOME"/
export A='b c'
export DDP_DEVICE=cpu
export PET_NNODES=2
export PET_NPROC_PER_NODE=2
export PET_NODE_RANK=1
export PET_MASTER_ADDR=10.0.0.1
export PET_MASTER_PORT=61000
export DDP_RUN_ID=night
export DDP_RUN_DIR=/home/alice/.ddpctl/runs/night
export DDP_CHECKPOINT_DIR=/home/alice/.ddpctl/runs/night/checkpoints
export CUDA_VISIBLE_DEVICES=''
setsid "$HOME"/venv/bin/python -P -m ddprun --run-id night --grace 30 -m ddptrain </dev/null \
>>"$HOME"/.ddpctl/runs/night/node-1/node.log 2>&1 &
"""
    )


def test_checkpoints_are_where_they_are_shared_or_were() -> None:
    shared = replace(OPTIONS, checkpoint_dir="/nfs/ckpt/")
    asked, submission = submit(facts(1), facts(2), options=shared)
    assert submission.checkpoint_dir == "box1:/nfs/ckpt/night"
    assert "--volume=/nfs/ckpt/night:/checkpoints " in (asked[-1][0].stdin or "")
    assert "DDP_CHECKPOINT_DIR=/checkpoints\n" in (asked[-1][0].stdin or "")
    again = replace(PLAN, run="night-2", run_dir="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
    asked, submission = submit(facts(1), facts(2), plan=again)
    assert submission.checkpoint_dir == RUN.checkpoint_dir
    assert "--volume=/home/alice/.ddpctl/runs/night/checkpoints:/checkpoints " in (asked[-1][0].stdin or "")


REFUSALS: list[tuple[dict[str, Any], type[DdpctlError], str]] = [
    ({"end": None}, UnavailableError, "it said nothing"),
    (
        {"engine": None, "image": None, "engine_error": "Cannot connect to the Docker daemon"},
        UnavailableError,
        "docker: Cannot connect to the Docker daemon",
    ),
    ({"flock": None}, UnavailableError, "flock is missing there: install util-linux"),
    (
        {"writable": None},
        UnavailableError,
        "~/.ddpctl cannot be written there: set the target's 'home' to a folder that can",
    ),
    (
        {"disk": "1024"},
        UnavailableError,
        "its disk is full: 0.0 GiB free where runs are kept (~/.ddpctl), 1 GiB needed (min_disk)",
    ),
    (
        {"lock": ("old", "old")},
        UnavailableError,
        "the run old is there, and a host has one run: wait for it, or ddpctl stop old",
    ),
    (
        {"image": None},
        ConfigError,
        "it does not have the image ddpctl:1: ddpctl image ship sends it, or pull it there",
    ),
    (
        {"image": inspected("sha256:bb")},
        ConfigError,
        f"ddpctl:1 is sha256:bb there, but {ID} is wanted, as on box1: give all hosts the same one (ddpctl image ship)",
    ),
    (
        {"gpu": GPUS[:1]},
        ConfigError,
        "it has 1 GPU, 2 needed: ask for fewer, or --device cpu for CPU ranks",
    ),
    (
        {"gpu": GPUS, "busy": GPUS[:2]},
        UnavailableError,
        "1 of its 3 GPUs is free, 2 needed: others compute on the rest (nvidia-smi)",
    ),
    (
        {"gpu": GPUS, "runtimes": "{}"},
        UnavailableError,
        "docker has no NVIDIA runtime there: install nvidia-container-toolkit",
    ),
]


@pytest.mark.parametrize(("words", "kind", "sentence"), REFUSALS, ids=[next(iter(words)) for words, _, _ in REFUSALS])
def test_a_host_that_is_not_ready_is_refused(words: dict[str, Any], kind: type[DdpctlError], sentence: str) -> None:
    gpus = {"gpu": GPUS} if "gpu" in words else {}
    with pytest.raises(kind) as error:
        submit(facts(1, **gpus), facts(2, **words))
    lines = str(error.value).splitlines()
    assert (type(error.value), error.value.nothing_started) == (kind, True)
    assert lines[0] == "nothing was started: 1 of 2 hosts is not ready"
    assert [(line.split()[0], line.endswith("not ready")) for line in lines[2:4]] == [("box1", False), ("box2", True)]
    assert lines[4:] == [f"box2: {sentence}"]


def test_an_image_is_the_same_by_a_registrys_digest() -> None:
    digest = "reg/ddpctl@sha256:" + "c" * 64
    submit(facts(1, image=inspected(digests=(digest,))), facts(2, image=inspected("sha256:bb", (digest,))))


def test_more_nodes_than_hosts() -> None:
    with pytest.raises(ConfigError) as error:
        next(SshTarget(OPTIONS).submit(replace(PLAN, job=replace(JOB, nodes="3")), attached=True))
    assert str(error.value) == "--nodes 3: the target has 2 hosts: ask for fewer nodes, or add hosts"


def test_a_node_that_does_not_start_takes_the_others_back() -> None:
    verb = SshTarget(OPTIONS).submit(PLAN, attached=True)
    with pytest.raises(UnavailableError) as error:
        play(verb, [(facts(1), facts(2)), CLOCKS, PORT, (OK, Output(returncode=125, stderr="a\nno space left\n"))])
    assert str(error.value) == "a node could not be started, and the others were taken back\nbox2: no space left"
    assert not error.value.nothing_started


def test_the_script_must_be_there() -> None:
    plan = replace(PLAN, job=replace(JOB, command=("train.py",)))
    with pytest.raises(ConfigError) as error:
        submit(facts(1, script="yes"), facts(2), options=replace(OPTIONS, project="/code"), plan=plan)
    assert str(error.value).splitlines()[-1] == (
        "box2: train.py: no such script in /code there: give its path, or let 'project: sync' send this folder"
    )


def shown(alive: bool, state: str | None = None, code: int | None = None) -> Output:
    node = {"run": "night", "node": 0, "pid": 1, "state": state, "started": 1.0} if state else None
    outcome = (
        {"code": code, "cause": "error" if code else "ok", "message": f"code {code}"} if code is not None else None
    )
    return Output(returncode=0, stdout=json.dumps({"alive": alive, "node": node, "outcome": outcome}) + "\n")


GONE = Output(returncode=255, stderr="the connection was lost: the host is gone")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((shown(True, "training"), shown(True, "rendezvous")), ("rendezvous", None, "2 of 2 nodes alive")),
        ((shown(False, "succeeded", 0), shown(False, "succeeded", 0)), ("succeeded", 0, "code 0")),
        (
            (shown(True, "training"), GONE),
            (
                "training",
                None,
                "1 of 2 nodes alive; box2 (node 1) does not answer: the connection was lost: the host is gone",
            ),
        ),
        (
            (shown(False, "failed", 3), GONE),
            ("failed", 3, "code 3; box2 (node 1) does not answer: the connection was lost: the host is gone"),
        ),
        (
            (GONE, GONE),
            (
                "unknown",
                None,
                "box1 (node 0) does not answer: the connection was lost: the host is gone; "
                "box2 (node 1) does not answer: the connection was lost: the host is gone",
            ),
        ),
        ((shown(False), shown(False)), ("starting", None, "no node has said a word yet")),
    ],
)
def test_status(said: tuple[Output, ...], expected: tuple[str, int | None, str]) -> None:
    (asked,), (state,) = play(SshTarget(OPTIONS).status((RUN,), now=1001.0), [said])
    assert [command.stdin for command in asked] == [scripts.show(OPTIONS, "night", node) for node in (0, 1)]
    assert (state.state, state.code, state.message) == expected


def test_logs_ask_the_node_of_a_rank() -> None:
    query = LogQuery(follow=True, ranks=(2, 3), tail=5)
    ((asked,),), _ = play(SshTarget(OPTIONS).logs(RUN, query), [(OK,)])
    assert (asked.host, asked.mode, asked.timeout_s) == (HOSTS[1].host, "stream", None)
    assert asked.stdin == scripts.logs("~/.ddpctl", "night", 1, (2, 3), tail=5, follow=True)
    with pytest.raises(NoInputError) as error:
        play(SshTarget(OPTIONS).logs(RUN, LogQuery(nodes=(1,))), [(Output(returncode=66),)])
    assert str(error.value) == "night has no such log: its nodes are 0 to 1, its ranks 0 to 3"


def test_stop_asks_every_host() -> None:
    answers = (Output(returncode=0, stdout='{"alive": false}\n'), Output(returncode=0, stdout='{"alive": true}\n'))
    (asked,), gone = play(SshTarget(OPTIONS).stop(RUN, kill=False), [answers])
    assert not gone
    assert asked[0].stdin == (
        "ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) || exit\n"
        '[ -z "$ids" ] || docker kill --signal TERM $ids >/dev/null 2>&1 || true\n'
        'if [ -n "$ids" ]; then timeout 35 docker wait ddpctl-night-0 >/dev/null 2>&1; fi\n'
        "n=0\n"
        "while ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) "
        '&& [ -n "$ids" ] && [ $n -lt 10 ]; do sleep 0.2; n=$((n + 1)); done\n'
        """if [ -z "$ids" ]; then echo '{"alive": false}'; else echo '{"alive": true}'; fi\n"""
    )
    with pytest.raises(UnavailableError) as error:
        play(SshTarget(BARE).stop(RUN, kill=True), [(answers[0], GONE)])
    assert str(error.value) == (
        "night could not be stopped everywhere\nbox2 (node 1): the connection was lost: the host is gone"
    )


def test_execute_goes_into_the_container() -> None:
    ((asked,),), code = play(
        SshTarget(OPTIONS).execute(RUN, node=1, argv=("nvidia-smi",), tty=False), [(Output(returncode=9),)]
    )
    assert (asked.argv, asked.host, asked.mode, code) == (
        ("docker", "exec", "ddpctl-night-1", "nvidia-smi"),
        HOSTS[1].host,
        "stream",
        9,
    )
    ((asked,),), _ = play(SshTarget(BARE).execute(RUN, node=0, argv=("echo", "a b"), tty=True), [(OK,)])
    assert (asked.argv, asked.mode) == (("/bin/sh", "-c", "cd \"$HOME\"/ && A='b c' echo 'a b'"), "tty")


@pytest.mark.parametrize("runtime", ["docker", "podman", "none"])
def test_shellcheck_finds_nothing_in_a_script(runtime: Any, tmp_path: Path) -> None:
    options = replace(OPTIONS, runtime=runtime, home="~/my runs", project="/a b")
    plan = replace(PLAN, job=replace(JOB, command=("train me.py", "it's")))
    asked, _ = play(
        SshTarget(options).submit(plan, attached=True),
        [(facts(1, script="yes"), facts(2, script="yes")), CLOCKS, PORT, (OK, OK)],
    )
    texts = [command.stdin for commands in asked for command in commands if command.argv == ("/bin/sh",)]
    texts += [scripts.show(options, "night", 0), scripts.signal_process(options, "night", 0, "TERM", 5)]
    texts += [scripts.logs(options.home, "night", 0, (1, 2), tail=3, follow=follow) for follow in (True, False)]
    texts += [
        scripts.signal_container("docker", options.home, "night", 0, kill=kill, wait_s=1, last_word="{}")
        for kill in (True, False)
    ]
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.sh"
        path.write_text(f"#!/bin/sh\n{text}")
        # The list of ids is to be split; what a trap runs is never reached by the text.
        done = subprocess.run(
            [shellcheck, "-s", "sh", "-e", "SC2086,SC2317", path], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
