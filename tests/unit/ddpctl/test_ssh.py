"""The target ssh starts a node on every host."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.answers import OK, matching, only, perform
from tests.unit.ddpctl.ssh_answers import (
    ANSWERS,
    BARE,
    FACTS,
    GPUS,
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

from ddpctl.command import Host, Output
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError, UnavailableError
from ddpctl.operations.removal import disk_usage_script
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.target import SshTarget


def test_a_launch_starts_a_container_on_every_host(snapshot: Callable[..., None]) -> None:
    asked, submission = submit(facts(1, gpu=GPUS, busy=("GPU-1",)), facts(2, gpu=GPUS))
    hosts = [Host(address="box1"), Host(address="box2", user="alice", port=2222)]
    preflight, starts = matching(asked, FACTS), matching(asked, START)
    assert [(command.argv, command.host, command.probe) for command in preflight] == [
        (("/bin/sh",), host, True) for host in hosts
    ]
    assert [command.host for command in matching(asked, "date +%s.%N")] == hosts
    assert only(asked, "ddprun.nodectl port").argv == (
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
    asked, _ = submit(facts(1, gpu=GPUS, busy=("GPU-0",)), facts(2, gpu=GPUS), options=options)
    assert '--gpus="device=GPU-1,GPU-2"' in (matching(asked, START)[0].stdin or "")


def test_a_launch_without_containers_starts_a_process_on_every_host(snapshot: Callable[..., None]) -> None:
    asked, _ = submit(*(facts(number, image=None, engine="Python 3.11.2") for number in (1, 2)), options=BARE)
    port = only(asked, "ddprun.nodectl port")
    assert port.stdin == '"$HOME"/venv/bin/python -P -m ddprun.nodectl port --host 10.0.0.1\n'
    snapshot(matching(asked, START)[1].stdin or "")


def test_checkpoints_are_where_they_are_shared_or_were() -> None:
    shared = replace(OPTIONS, checkpoint_dir="/nfs/ckpt/")
    asked, submission = submit(facts(1), facts(2), options=shared)
    assert submission.checkpoint_dir == "box1:/nfs/ckpt/night"
    text = matching(asked, START)[0].stdin or ""
    assert 'mkdir -p "$HOME"/.ddpctl/runs/night/node-0 /nfs/ckpt/night || exit 73\n' in text
    assert "--volume=/nfs/ckpt/night:/checkpoints " in text
    assert "DDP_CHECKPOINT_DIR=/checkpoints\n" in text
    again = replace(PLAN, name="night-2", folder="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
    asked, submission = submit(facts(1), facts(2), plan=again)
    assert submission.checkpoint_dir == RUN.checkpoint_dir
    text = matching(asked, START)[0].stdin or ""
    assert "--volume=/home/alice/.ddpctl/runs/night/checkpoints:/checkpoints " in text


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
    asked, _ = submit(facts(1, script="yes"), facts(2, script="yes"), options=options, plan=plan)
    texts = [command.stdin for command in asked if command.argv == ("/bin/sh",)]
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
