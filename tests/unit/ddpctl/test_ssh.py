"""The target ssh: its hosts and their OpenSSH, which of them are ready, and the whole commands of its verbs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.answers import OK, matching, only, perform
from tests.unit.ddpctl.ssh_answers import (
    ANSWERS,
    BARE,
    FACTS,
    GPUS,
    HOSTS,
    ID,
    JOB,
    OPTIONS,
    PLAN,
    RUN,
    START,
    by_host,
    facts,
    submit,
)  # fmt: skip

from ddpctl import targets
from ddpctl.command import Command, Host, Output
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.execution.ssh import read_settings
from ddpctl.job import config
from ddpctl.job.launch_plan import Request
from ddpctl.operations.removal import disk_usage_script
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.project import sync
from ddpctl.targets.ssh.scripts import env_file
from ddpctl.targets.ssh.target import SshTarget


def test_a_launch_starts_a_container_on_every_host(snapshot: Callable[..., None]) -> None:
    commands, submission = submit(facts(1, gpu=GPUS, busy=("GPU-1",)), facts(2, gpu=GPUS))
    hosts = [Host(address="box1"), Host(address="box2", user="alice", port=2222)]
    preflight, starts = matching(commands, FACTS), matching(commands, START)
    assert [(command.argv, command.host, command.probe) for command in preflight] == [
        (("/bin/sh",), host, True) for host in hosts
    ]
    assert [command.host for command in matching(commands, "date +%s.%N")] == hosts
    assert only(commands, "ddprun.nodectl port").argv == (
        "docker", "run", "--rm", "--network=host", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--read-only", "--tmpfs=/tmp:rw,exec,nosuid,nodev", "--entrypoint=python3", ID, "-P", "-m", "ddprun.nodectl",
        "port", "--host", "10.0.0.1",
    )  # fmt: skip
    assert [command.host for command in starts] == hosts
    snapshot(starts[0].stdin or "")
    assert "PET_NODE_RANK=1\n" in (starts[1].stdin or "")
    assert '--gpus="device=GPU-0,GPU-1"' in (starts[1].stdin or "")
    assert submission.handle == {
        "port": "61000",
        "address": "10.0.0.1",
        "logs": "ddpctl logs night",
        "hosts": (0, 1),
        "nodes": "2",
        "device": "cuda",
    }
    assert submission.checkpoint_dir == "box1:~/.ddpctl/runs/night/checkpoints"
    assert submission.table == (
        "HOST  SSH  DOCKER  IMAGE         GPUS FREE  DISK FREE  CLOCK   STATE",
        "box1  yes  28.2.2  aaaaaaaaaaaa  2 of 3     100 GiB    +0.0 s  ready",
        "box2  yes  28.2.2  aaaaaaaaaaaa  3 of 3     100 GiB    +0.0 s  ready",
    )


def test_a_node_never_gets_the_same_gpu_twice() -> None:
    options = replace(OPTIONS, hosts=(replace(OPTIONS.hosts[0], gpus=2), OPTIONS.hosts[1]))
    commands, _ = submit(facts(1, gpu=GPUS, busy=("GPU-0",)), facts(2, gpu=GPUS), options=options)
    assert '--gpus="device=GPU-1,GPU-2"' in (matching(commands, START)[0].stdin or "")


def test_a_launch_without_containers_starts_a_process_on_every_host(snapshot: Callable[..., None]) -> None:
    commands, _ = submit(*(facts(number, image=None, engine="Python 3.11.2") for number in (1, 2)), options=BARE)
    port = only(commands, "ddprun.nodectl port")
    assert port.stdin == '"$HOME"/venv/bin/python -P -m ddprun.nodectl port --host 10.0.0.1\n'
    snapshot(matching(commands, START)[1].stdin or "")


def test_checkpoints_are_where_they_are_shared_or_were() -> None:
    shared = replace(OPTIONS, checkpoint_dir="/nfs/ckpt/")
    commands, submission = submit(facts(1), facts(2), options=shared)
    assert submission.checkpoint_dir == "box1:/nfs/ckpt/night"
    text = matching(commands, START)[0].stdin or ""
    assert 'mkdir -p "$HOME"/.ddpctl/runs/night/node-0 /nfs/ckpt/night || exit 73\n' in text
    assert "--volume=/nfs/ckpt/night:/checkpoints " in text
    assert "DDP_CHECKPOINT_DIR=/checkpoints\n" in text
    again = replace(PLAN, name="night-2", folder="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
    commands, submission = submit(facts(1), facts(2), plan=again)
    assert submission.checkpoint_dir == RUN.checkpoint_dir
    text = matching(commands, START)[0].stdin or ""
    assert "--volume=/home/alice/.ddpctl/runs/night/checkpoints:/checkpoints " in text


def test_roots_folders_are_given_to_the_image_and_a_port_and_spares_are_as_the_job_has_them() -> None:
    plan = replace(PLAN, job=replace(JOB, nodes="1", spares=1, port=4000))
    commands, submission = submit(facts(1, id="0:0"), facts(2), plan=plan)
    owned, other = (command.stdin or "" for command in matching(commands, START))
    assert ("chown -R 10001:10001 " in owned, "--user=10001:10001 " in owned, "chown" in other) == (True, True, False)
    assert only(commands, "ddprun.nodectl port").argv[-2:] == ("--want", "4000")
    assert "checkpoint_copies" in submission.note


def test_more_nodes_than_hosts_are_refused_before_a_host_is_asked() -> None:
    plan = replace(PLAN, job=replace(JOB, nodes="3"))
    with pytest.raises(ConfigError) as error:
        next(SshTarget(OPTIONS).submit(plan, attached=True))
    assert ("--nodes: 3" in str(error.value), "2 hosts" in str(error.value)) == (True, True)


def test_nodes_that_do_not_start_are_named_with_their_causes() -> None:
    full = Output(returncode=125, stderr="a\nno space left\n")
    with pytest.raises(UnavailableError) as error:
        submit(facts(1), facts(2), answers={START: by_host(OK, full)})
    assert [line for line in str(error.value).splitlines() if line.startswith("box")] == ["box2: no space left"]
    with pytest.raises(UnavailableError) as error:  # it may have been started
        submit(facts(1), facts(2), answers={START: Output(returncode=124)})
    assert error.value.fields["submission"].handle["hosts"] == (0, 1)
    refused = Output(returncode=73, stderr="mkdir: cannot create directory '/proc/nope'\n")
    with pytest.raises(CannotWriteError) as both:
        submit(facts(1), facts(2), answers={START: refused})
    assert [line for line in str(both.value).splitlines() if line.startswith("box")] == [
        f"box{number}: {refused.stderr.strip()}" for number in (1, 2)
    ]


def test_a_host_without_the_script_is_named() -> None:
    plan = replace(PLAN, job=replace(JOB, command=("train.py",)))
    code, ready = replace(OPTIONS, project="/code"), (facts(1, script="yes"), facts(2))
    with pytest.raises(NoInputError) as error:
        submit(*ready, options=code, plan=plan)
    assert [fact in str(error.value).splitlines()[-1] for fact in ("box2: ", "/code", "'train.py'")] == [True] * 3
    with pytest.raises(NoInputError):
        perform(SshTarget(code).dry_run(plan), {FACTS: by_host(*ready), **ANSWERS})
    with pytest.raises(ConfigError):
        submit(facts(1, image=None), facts(2), options=code, plan=plan)


@pytest.mark.parametrize("runtime", ["docker", "podman", "none"])
def test_shellcheck_finds_nothing_in_a_script(runtime: Any, tmp_path: Path) -> None:
    options = replace(OPTIONS, runtime=runtime, home="~/my runs", project="/a b")
    plan = replace(PLAN, job=replace(JOB, command=("train me.py", "it's")))
    commands, _ = submit(facts(1, script="yes"), facts(2, script="yes"), options=options, plan=plan)
    texts = [command.stdin for command in commands if command.argv == ("/bin/sh",)]
    folder = scripts.claims_folder(options.home)
    texts += [
        claims.take_ticket(folder, "night", "12ab"),
        claims.renew(folder, 3),
        scripts.gpus_text(options, load=True),
    ]
    texts += [scripts.show(options, [("night", 0), ("day", 1)]), scripts.signal_process(options, "night", 0, "TERM", 5)]
    texts.append(disk_usage_script("~/my runs", ["night", "it's"], dry_run=False))
    for query in (LogQuery(tail=3), LogQuery(tail=3, follow=True, ranks=(0, 1)), LogQuery(timestamps=True)):
        texts.append(scripts.logs(options.home, "night", 0, query.files(RUN)[0], query))
    texts += [
        scripts.signal_container("docker", options.home, "night", 0, name, wait_s=1, last_word="{}")
        for name in ("INT", "KILL")
    ]
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck
    paths = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(f"#!/bin/sh\n{text}")
    # The list of ids is to be split; what a trap runs is never reached by the text.
    line = [shellcheck, "-s", "sh", "-e", "SC2086,SC2317", *paths]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_an_environment_file_holds_no_line_ends() -> None:
    assert env_file({"A": "b c", "B": ""}) == "A=b c\nB=\n"
    with pytest.raises(ConfigError, match="KEY"):
        env_file({"KEY": "two\nlines"})


REFUSALS: dict[str, tuple[dict[str, Any], type[DdpctlError], str]] = {
    "silent": ({"end": None}, UnavailableError, "without an error message"),
    "disk": ({"disk": "1024"}, UnavailableError, "min_disk"),
    "ticket": ({"gpu": GPUS, "ticket": "000000001 old 12ab"}, UnavailableError, "run 'old' is already waiting"),
    "no-image": ({"image": None}, ConfigError, "ddpctl:1"),
    "busy-gpus": ({"gpu": GPUS, "busy": GPUS[:2]}, UnavailableError, "1 of 3"),
    "same-machine": ({"machine": "gpu1 /home/alice 12ab"}, ConfigError, "box2 and box1"),
}


@pytest.mark.parametrize(("changes", "kind", "cause"), REFUSALS.values(), ids=REFUSALS)
def test_a_host_that_is_not_ready_is_refused(changes: dict[str, Any], kind: type[DdpctlError], cause: str) -> None:
    gpus = {"gpu": GPUS} if "gpu" in changes else {}
    commands: list[Command] = []
    with pytest.raises(kind) as error:
        submit(facts(1, machine="gpu1 /home/alice 12ab", **gpus), facts(2, **changes), commands=commands)
    lines = str(error.value).splitlines()
    assert (type(error.value), any(command.starts for command in commands)) == (kind, False)
    assert "1 of 2" in lines[0]
    assert [(line.split()[0], line.endswith("not ready")) for line in lines[2:4]] == [("box1", False), ("box2", True)]
    (sentence,) = lines[4:]
    assert (sentence.startswith("box2: "), cause in sentence) == (True, True)


HEAD = "targets:\n  boxes:\n    kind: ssh\n"


def load(text: str, tmp_path: Path) -> Request:
    (tmp_path / "ddpctl.yaml").write_text(HEAD + text)
    kinds = targets.kinds()
    return config.load(file=tmp_path / "ddpctl.yaml", target="boxes", kinds=kinds)


WHOLE = """\
    hosts:
      - box1
      - alice@10.0.0.2:2222
      - "[fe80::1]:22"
      - {address: box4, user: bob, port: 23, key: ~/.ssh/box, peer: 10.0.0.4, gpus: 2}
    runtime: podman
"""


def test_hosts_are_written_short_or_long(tmp_path: Path) -> None:
    options = load(WHOLE, tmp_path).options
    assert options == SshOptions(
        hosts=(
            SshHost(address="box1"),
            SshHost(address="10.0.0.2", user="alice", port=2222),
            SshHost(address="fe80::1", port=22),
            SshHost(address="box4", user="bob", port=23, key="~/.ssh/box", peer="10.0.0.4", gpus=2),
        ),
        runtime="podman",
    )
    assert targets.fill_options(SshOptions, json.loads(json.dumps(asdict(options)))) == options
    with pytest.raises(ConfigError, match="hosts"):
        targets.fill_options(SshOptions, {})


def shows(alive: bool, state: str | None = None, code: int | None = None, steps: str = "") -> Output:
    node = {"run": "night", "node": 0, "pid": 1, "state": state, "started": 1.0} if state else None
    outcome = (
        {"code": code, "cause": "error" if code else "ok", "message": f"code {code}"} if code is not None else None
    )
    answer = {"alive": alive, "node": node, "outcome": outcome, "history": f"time,ddp_last_step\n{steps}\n"}
    return Output(returncode=0, stdout=json.dumps(answer) + "\n")


def lost(node: int) -> Output:
    """A node that has ended because it lost the connection to node 0, or whose loss node 0 has seen."""
    outcome = {"code": 137, "cause": "node_lost", "message": f"node {node} was lost"}
    return Output(returncode=0, stdout=json.dumps({"alive": False, "node": None, "outcome": outcome}) + "\n")


GONE = Output(returncode=255, stderr="the connection was lost (the host is gone)")


def status(*answers: Output, run: Run = RUN) -> RunStatus:
    """The status of a run whose hosts answer so."""
    commands, (state,) = perform(SshTarget(OPTIONS).status((run,), now=1001.0), {"": by_host(*answers)})
    assert [command.stdin for command in commands] == [scripts.show(OPTIONS, [("night", node)]) for node in (0, 1)]
    return state


LOST_HOST = "does not answer: the connection was lost"
STEPS, ENDED, FAILED = shows(True, "training", steps="1.0,5"), shows(False, "succeeded", 0), shows(False, "failed", 3)
STATES = {
    "rendezvous": (shows(True, "training"), shows(True, "rendezvous"), "rendezvous", None, "2 of 2"),
    "succeeded": (ENDED, ENDED, "succeeded", 0, "code 0"),
    "training-and-gone": (STEPS, GONE, "training", None, f"box2 (node 1) {LOST_HOST}"),
    "failed-and-gone": (FAILED, GONE, "failed", 3, f"code 3; box2 (node 1) {LOST_HOST}"),
    "node-0-gone": (GONE, lost(0), "failed", 137, f"node 0 was lost; box1 (node 0) {LOST_HOST}"),
    "goes-on-alone": (STEPS, lost(0), "training", None, "1 of 2"),
    "gone": (GONE, GONE, "unknown", None, f"box1 (node 0) {LOST_HOST}"),
    "silent": (shows(False), shows(False), "lost", 137, "node.log"),
}


@pytest.mark.parametrize(("first", "second", "state", "code", "facts"), STATES.values(), ids=STATES)
def test_the_status_of_a_run_follows_from_what_its_hosts_show(
    first: Output, second: Output, state: str, code: int | None, facts: str
) -> None:
    run = status(first, second)
    assert (run.state, run.code, facts in run.message) == (state, code, True)


ELASTIC = replace(RUN, job=replace(RUN.job, nodes="1:2"), options=asdict(OPTIONS))


def test_node_0_of_an_elastic_run_may_train_on_where_it_does_not_answer() -> None:
    elastic = status(GONE, lost(0), run=ELASTIC)
    assert (elastic.state, elastic.code, elastic.remains) == ("unknown", None, False)
    assert f"box1 (node 0) {LOST_HOST}" in elastic.message
    assert status(GONE, lost(0)).remains
    assert not status(lost(1), GONE).remains, "what is left of node 0 is unknown"


def test_logs_ask_the_node_of_a_rank() -> None:
    query = LogQuery(follow=True, ranks=(2, 3), tail=5)
    logs = only(perform(SshTarget(OPTIONS).logs(RUN, query), {})[0])
    assert (logs.host, logs.mode, logs.timeout_s) == (HOSTS[1].host, "stream", None)
    assert logs.stdin == scripts.logs("~/.ddpctl", "night", 1, query.files(RUN)[1], query)
    both, _ = perform(SshTarget(OPTIONS).logs(RUN, LogQuery()), {})
    connects, prints = both[:2], both[2:]
    assert ([command.argv for command in connects], len(prints)) == ([("true",)] * 2, 2)
    assert [command.host for command in connects] == [command.host for command in prints]
    with pytest.raises(NoInputError, match="'night'"):
        perform(SshTarget(OPTIONS).logs(RUN, LogQuery(nodes=(1,))), {"": Output(returncode=66)})


def test_stop_asks_every_host_and_names_one_that_does_not_answer() -> None:
    answers = {"": by_host(*(Output(returncode=0, stdout=f'{{"alive": {alive}}}\n') for alive in ("false", "true")))}
    commands, gone = perform(SshTarget(OPTIONS).stop(RUN, signal="TERM"), answers)
    assert not gone
    assert commands[0].stdin == (
        "ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) || exit\n"
        '[ -z "$ids" ] || docker kill --signal TERM $ids >/dev/null 2>&1 || true\n'
        'if [ -n "$ids" ]; then timeout 35 docker wait ddpctl-night-0 >/dev/null 2>&1; fi\n'
        "n=0\n"
        "while ids=$(docker ps --all --quiet --filter label=ddpctl.run=night --filter label=ddpctl.node=0) "
        '&& [ -n "$ids" ] && [ $n -lt 10 ]; do sleep 0.2; n=$((n + 1)); done\n'
        """if [ -z "$ids" ]; then echo '{"alive": false}'; else echo '{"alive": true}'; fi\n"""
    )
    for options, part in ((OPTIONS, "docker kill --signal INT $ids "), (BARE, "nodectl signal --signal INT --wait 0 ")):
        commands, _ = perform(SshTarget(options).stop(RUN, signal="INT", wait=False), answers)
        assert part in str(commands[0].stdin)
    commands, _ = perform(SshTarget(OPTIONS).stop(RUN, signal="KILL"), answers)
    assert "/node-0/outcome.json ] || printf " in str(commands[0].stdin), "an outcome is kept"
    answers = {"": by_host(Output(returncode=0, stdout='{"alive": false}\n'), GONE)}
    with pytest.raises(UnavailableError) as error:
        perform(SshTarget(BARE).stop(RUN, signal="KILL"), answers)
    assert str(error.value).splitlines()[1:] == [f"box2 (node 1): {GONE.stderr}"]


def test_execute_goes_into_the_container() -> None:
    commands, code = perform(
        SshTarget(OPTIONS).execute(RUN, node=1, argv=("nvidia-smi",), tty=False), {"": Output(returncode=9)}
    )
    command = only(commands)
    assert (command.argv, command.host, command.mode, code) == (
        ("docker", "exec", "--env=A=b c", "ddpctl-night-1", "nvidia-smi"),
        HOSTS[1].host,
        "stream",
        9,
    )
    command = only(perform(SshTarget(BARE).execute(RUN, node=0, argv=("echo", "a b"), tty=True), {"": OK})[0])
    assert (command.argv, command.mode) == (("/bin/sh", "-c", "cd \"$HOME\"/ && A='b c' echo 'a b'"), "tty")


def test_what_is_outside_of_a_runs_folder_is_pulled_named_and_removed_with_it() -> None:
    target = SshTarget(replace(BARE, project="sync", environment="/p/uv.lock"))
    queries, _ = perform(target.made(RUN), {})
    assert {str(command.stdin).endswith("/runs/night && made_summary\n") for command in queries} == {True}
    assert "/.ddpctl/environments" in target.remove_outside()
    first, *_ = next(target.pull(replace(RUN, checkpoint_dir="box1:/nfs/night"), "/out"))
    assert "/nfs/night" in str(first.stdin)


def test_a_sync_removes_old_files_before_it_sends_and_its_archives_afterwards() -> None:
    listed = {"files": {"a.py": "new"}, "sizes": {"a.py": 5}, "left_out": [], "rsync": False, "zstd": False}
    answers = {
        "stat --printf": Output(returncode=0, stdout="\0".join(("/home/x", "", "", "3 1.0 644 ./old/b.py", ""))),
        "tar --create": Output(returncode=0, stdout="7\nAAAA"),
        "project_files": Output(returncode=0, stdout=json.dumps(listed)),
    }
    verb = sync([Host(address="box1")], cwd="/p", home="~/.ddpctl", run="night", run_dir="/r")
    removed, packed, sent, cleared, linked = perform(verb, answers)[0][2:]
    assert (removed.stdin, removed.argv[-1].endswith("-type d -empty -delete")) == ("old/b.py\0", True)
    assert (packed.argv[4], sent.stdin, cleared.argv) == ("/r/project.tar.0", "AAAA", ("rm", "-f", "/r/project.tar.0"))
    copy = '"$HOME"/.ddpctl/runs/night/project'
    assert f"rm -rf {copy}\ncp -al . {copy}\n" in str(linked.stdin)


@pytest.mark.parametrize(
    ("text", "cause"),
    [("Include {home}/.ssh/config\n", "~/.ssh/config: .*recursive"), ("Bogus x\n", "~/.ssh/config: .*line 1: .*bogus"),
     (None, "OpenSSH")],
    ids=["recursive", "unknown", "no OpenSSH"],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_with_openssh_s_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, cause: str
) -> None:
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if text else str(tmp_path))
    (tmp_path / ".ssh/config").write_text((text or "").format(home=tmp_path))
    with pytest.raises(ConfigError, match=cause):
        read_settings(Host(address="box"), tmp_path)
