"""The target ssh starts a node on every host: whole command lines and scripts against recorded answers."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.ssh_answers import BARE, CLOCKS, GPUS, ID, JOB, OK, OPTIONS, PLAN, PORT, RUN, facts, play, submit
from tests.wording import Wording

from ddpctl.command import Host, Output, shell_line
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError, NotStartedError, UnavailableError
from ddpctl.removal import disk_usage_script
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.project import sync
from ddpctl.targets.ssh.target import SshTarget


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
mkdir -p "$HOME"/.ddpctl/runs/night/node-0 /home/alice/.ddpctl/runs/night/checkpoints || exit 73
(umask 077 && printf %s 0123456789abcdef >"$HOME"/.ddpctl/runs/night/store.secret.0 \
&& mv -f "$HOME"/.ddpctl/runs/night/store.secret.0 "$HOME"/.ddpctl/runs/night/store.secret)
_ddp_c="$HOME"/.ddpctl/claims-"$(uname -n)"
_ddp_held() {{
  flock -n -s "$1" true || return 0
  read -r _ddp_run _ddp_node _ _ddp_engine _ <"$1" || return 1
  case $_ddp_engine in docker|podman) ;; *) return 1 ;; esac
  _ddp_ids=$(timeout 10 "$_ddp_engine" ps --quiet \\
    --filter "label=ddpctl.run=$_ddp_run" --filter "label=ddpctl.node=$_ddp_node") || return 0
  [ -n "$_ddp_ids" ]
}}
mkdir -p "$_ddp_c"
exec 8>>"$_ddp_c/mutex"
flock -w 60 8 || {{ echo "another launch is starting a run there" >&2; exit 75; }}
for _ddp_f in "$_ddp_c"/run-*; do
  [ -e "$_ddp_f" ] || continue
  _ddp_held "$_ddp_f" || {{ rm -f "$_ddp_f"; continue; }}
  read -r _ddp_run _ _ _ _ddp_gpus <"$_ddp_f"
  for _ddp_gpu in GPU-0 GPU-2; do
    case " $_ddp_gpus " in *" $_ddp_gpu "*) echo "the run $_ddp_run has $_ddp_gpu" >&2; exit 75 ;; esac
  done
done
echo night 0 "$(date +%s)" docker GPU-0 GPU-2 >"$HOME"/.ddpctl/claims-"$(uname -n)"/run-night.0
_ddp_env=$(umask 077 && mktemp "$HOME"/.ddpctl/runs/night/env.XXXXXX)
trap 'rm -f "$_ddp_env"' EXIT
cat >"$_ddp_env" <<'END_OF_FILE'
HOME=/tmp
USER=ddp
DDP_DEVICE=cuda
PET_NNODES=2
PET_NPROC_PER_NODE=2
PET_NODE_RANK=0
PET_MASTER_ADDR=10.0.0.1
PET_MASTER_PORT=61000
DDP_RUN_ID=night
DDP_RUN_DIR=/runs/night
DDP_CHECKPOINT_DIR=/runs/night/checkpoints
DDP_SECRET_FILE=/runs/night/store.secret
DDP_IMAGE={ID}
DDP_JOB_ENV={{"A": "b c"}}
END_OF_FILE
docker run --detach --rm --init --name=ddpctl-night-0 --label=ddpctl.run=night --label=ddpctl.node=0 --network=host \
--user=1000:1000 "--env-file=$_ddp_env" --shm-size=8589934592 \
--cap-drop=ALL --security-opt=no-new-privileges --read-only --tmpfs=/tmp:rw,exec,nosuid,nodev \
--volume=/home/alice/.ddpctl/runs/night:/runs/night --volume=/data:/data:ro '--gpus="device=GPU-0,GPU-2"' \
--ulimit=memlock=-1:-1 \
--entrypoint=/bin/sh {ID} -c 'exec ddprun "$@" >>"$DDP_RUN_DIR/node-$PET_NODE_RANK/node.log" 2>&1' ddprun \
--grace 30 -m ddptrain >/dev/null 8>&-
"""
    )
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


def test_root_gives_the_folder_to_the_images_user() -> None:
    asked, _ = submit(*(facts(number, id="0:0", home="/root") for number in (1, 2)))
    text = asked[-1][0].stdin or ""
    assert 'chown -R 10001:10001 "$HOME"/.ddpctl/runs/night && chown 10001:10001 /root/.ddpctl/' in text
    assert "--user=10001:10001 " in text


def test_a_process_where_there_is_no_container() -> None:
    asked, _ = submit(*(facts(number, image=None, engine="Python 3.11.2") for number in (1, 2)), options=BARE)
    assert asked[2][0].stdin == '"$HOME"/venv/bin/python -P -m ddprun.nodectl port --host 10.0.0.1\n'
    assert (
        asked[3][1].stdin
        == """\
set -eu
mkdir -p "$HOME"/.ddpctl/runs/night/node-1 /home/alice/.ddpctl/runs/night/checkpoints || exit 73
(umask 077 && printf %s 0123456789abcdef >"$HOME"/.ddpctl/runs/night/store.secret.1 \
&& mv -f "$HOME"/.ddpctl/runs/night/store.secret.1 "$HOME"/.ddpctl/runs/night/store.secret)
_ddp_c="$HOME"/.ddpctl/claims-"$(uname -n)"
_ddp_held() {
  flock -n -s "$1" true || return 0
  read -r _ddp_run _ddp_node _ _ddp_engine _ <"$1" || return 1
  case $_ddp_engine in docker|podman) ;; *) return 1 ;; esac
  _ddp_ids=$(timeout 10 "$_ddp_engine" ps --quiet \\
    --filter "label=ddpctl.run=$_ddp_run" --filter "label=ddpctl.node=$_ddp_node") || return 0
  [ -n "$_ddp_ids" ]
}
mkdir -p "$_ddp_c"
exec 8>>"$_ddp_c/mutex"
flock -w 60 8 || { echo "another launch is starting a run there" >&2; exit 75; }
for _ddp_f in "$_ddp_c"/run-*; do
  [ -e "$_ddp_f" ] || continue
  _ddp_held "$_ddp_f" || { rm -f "$_ddp_f"; continue; }
done
exec 9>>"$HOME"/.ddpctl/claims-"$(uname -n)"/run-night.1
flock -w 10 9 || { echo "night is there already" >&2; exit 75; }
echo night 1 "$(date +%s)" none >"$HOME"/.ddpctl/claims-"$(uname -n)"/run-night.1
cd "$HOME"/
export DDP_DEVICE=cpu
export PET_NNODES=2
export PET_NPROC_PER_NODE=2
export PET_NODE_RANK=1
export PET_MASTER_ADDR=10.0.0.1
export PET_MASTER_PORT=61000
export DDP_RUN_ID=night
export DDP_RUN_DIR=/home/alice/.ddpctl/runs/night
export DDP_CHECKPOINT_DIR=/home/alice/.ddpctl/runs/night/checkpoints
export DDP_SECRET_FILE=/home/alice/.ddpctl/runs/night/store.secret
export CUDA_VISIBLE_DEVICES=''
export DDP_JOB_ENV='{"A": "b c"}'
setsid "$HOME"/venv/bin/python -P -m ddprun --grace 30 -m ddptrain </dev/null \
>>"$HOME"/.ddpctl/runs/night/node-1/node.log 2>&1 8>&- &
"""
    )


def test_checkpoints_are_where_they_are_shared_or_were() -> None:
    shared = replace(OPTIONS, checkpoint_dir="/nfs/ckpt/")
    asked, submission = submit(facts(1), facts(2), options=shared)
    assert submission.checkpoint_dir == "box1:/nfs/ckpt/night"
    assert 'mkdir -p "$HOME"/.ddpctl/runs/night/node-0 /nfs/ckpt/night || exit 73\n' in (asked[-1][0].stdin or "")
    assert "--volume=/nfs/ckpt/night:/checkpoints " in (asked[-1][0].stdin or "")
    assert "DDP_CHECKPOINT_DIR=/checkpoints\n" in (asked[-1][0].stdin or "")
    again = replace(PLAN, run="night-2", run_dir="/s/night-2", checkpoint_dir=RUN.checkpoint_dir)
    asked, submission = submit(facts(1), facts(2), plan=again)
    assert submission.checkpoint_dir == RUN.checkpoint_dir
    assert "--volume=/home/alice/.ddpctl/runs/night/checkpoints:/checkpoints " in (asked[-1][0].stdin or "")


def test_more_nodes_than_hosts(wording: Wording) -> None:
    with pytest.raises(NotStartedError) as error:
        next(SshTarget(OPTIONS).submit(replace(PLAN, job=replace(JOB, nodes="3")), attached=True))
    assert isinstance(error.value.reason, ConfigError)
    wording(error.value)


def test_a_node_that_does_not_start_takes_the_others_back(wording: Wording) -> None:
    verb = SshTarget(OPTIONS).submit(PLAN, attached=True)
    with pytest.raises(UnavailableError) as error:
        play(verb, [(facts(1), facts(2)), CLOCKS, PORT, (OK, Output(returncode=125, stderr="a\nno space left\n"))])
    wording(error.value)
    refused = Output(returncode=73, stderr="mkdir: cannot create directory '/proc/nope'\n")
    with pytest.raises(CannotWriteError) as both:
        play(SshTarget(OPTIONS).submit(PLAN, attached=True), [(facts(1), facts(2)), CLOCKS, PORT, (refused, refused)])
    wording(both.value)


def test_the_script_must_be_there(wording: Wording) -> None:
    plan = replace(PLAN, job=replace(JOB, command=("train.py",)))
    code = replace(OPTIONS, project="/code")
    with pytest.raises(NoInputError) as error:
        submit(facts(1, script="yes"), facts(2), options=code, plan=plan)
    wording(str(error.value).splitlines()[-1])
    dry_run = SshTarget(code).dry_run(plan)
    with pytest.raises(NoInputError):
        play(dry_run, [(facts(1, script="yes"), facts(2)), CLOCKS, PORT, (OK, OK)])
    with pytest.raises(ConfigError):
        submit(facts(1, image=None), facts(2), options=code, plan=plan)


@pytest.mark.parametrize("runtime", ["docker", "podman", "none"])
def test_shellcheck_finds_nothing_in_a_script(runtime: Any, tmp_path: Path) -> None:
    options = replace(OPTIONS, runtime=runtime, home="~/my runs", project="/a b")
    plan = replace(PLAN, job=replace(JOB, command=("train me.py", "it's")))
    asked, _ = play(
        SshTarget(options).submit(plan, attached=True),
        [(facts(1, script="yes"), facts(2, script="yes")), CLOCKS, PORT, (OK, OK)],
    )
    texts = [command.stdin for commands in asked for command in commands if command.argv == ("/bin/sh",)]
    folder = scripts.claims_folder(options.home)
    texts += [
        claims.take_ticket(folder, "night", "12ab"),
        claims.renew(folder, 3),
        scripts.gpus_text(options, load=True),
    ]
    texts += [scripts.show(options, [("night", 0), ("day", 1)]), scripts.signal_process(options, "night", 0, "TERM", 5)]
    texts.append(disk_usage_script("~/my runs", ["night", "it's"], dry_run=False))
    for query in (LogQuery(tail=3), LogQuery(tail=3, follow=True), LogQuery(timestamps=True)):
        texts.append(scripts.logs(options.home, "night", 0, query.files(RUN, 0, (1, 2)), query))
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


def test_a_dry_run_shows_its_lines_also_where_a_host_is_not_ready(wording: Wording) -> None:
    with pytest.raises(UnavailableError) as error:
        play(
            SshTarget(OPTIONS).dry_run(PLAN),
            [(facts(1, gpu=GPUS), Output(returncode=255, stderr="no route\n")), CLOCKS[:2], PORT, (OK, OK)],
        )
    wording(str(error.value).splitlines()[0])
    verb = SshTarget(OPTIONS).dry_run(PLAN)
    answers = [(facts(1, gpu=GPUS), Output(returncode=255)), CLOCKS[:2], PORT]
    next(verb)
    first, second = [verb.send(answer) for answer in answers][-1]
    assert '--gpus="device=GPU-0,GPU-1"' in (first.stdin or "")
    line = next(line for line in (second.stdin or "").splitlines() if line.startswith("docker run"))
    assert "'--user=<uid>:<gid>'" in line
    assert "'--volume=<home>/.ddpctl/runs/night:/runs/night'" in line
    assert """'--gpus="device=<GPU 0>,<GPU 1>"'""" in line
    assert "'sha256:<image>'" in line
    without = SshTarget(OPTIONS).dry_run(PLAN)
    next(without)
    answers = [(facts(1, image=None), facts(2)), CLOCKS, PORT]
    starts = [without.send(answer) for answer in answers][-1]
    assert ["--gpus" in (start.stdin or "") for start in starts] == [False, False]


def test_a_dry_run_sends_the_whole_project() -> None:
    listed = {"files": {"a.py": "1"}, "sizes": {"a.py": 1}, "left_out": [], "rsync": True, "zstd": True}
    here = Output(returncode=0, stdout=json.dumps(listed))
    verb = sync([OPTIONS.hosts[0].host], cwd="/p", home="~/.ddpctl", run="night", run_dir="/s/night")
    asked, lines = next(verb), []
    with suppress(StopIteration):
        while True:
            lines += [shell_line(command) for command in asked]
            asked = verb.send(tuple(here if one.probe else replace(OK, stdout=one.placeholder) for one in asked))
    (sent,) = [line for line in lines if "tar --extract" in line]
    assert sent.startswith("ssh -- box1 ")
    assert sent.endswith(" </s/night/project.tar.0")
