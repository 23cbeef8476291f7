"""ddpctl rm: what it runs in each place, what it makes of the answers, and whom it refuses."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.ddpctl.ssh_answers import HOSTS, OPTIONS, play
from tests.ddpctl.ssh_answers import RUN as ON_HOSTS
from tests.ddpctl.test_slurm_target import RUN as ON_SLURM
from tests.wording import Wording

from ddpctl import removal, run_store, targets
from ddpctl.command import Command, Host, Output, Verb
from ddpctl.commands import formatting
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, UnavailableError, UsageError
from ddpctl.executor import Executor
from ddpctl.launcher import AppContext
from ddpctl.run_status import RunStatus
from ddpctl.run_store import DiskUsage, Run
from ddpctl.targets import Target
from ddpctl.targets.slurm import SlurmOptions, SlurmTarget
from ddpctl.targets.ssh import SshTarget

GONE = Output(returncode=0, stdout='{"alive": false}\n')
LOOKED = Output(returncode=0, stdout="size 3000\ncheckpoints 2000\nstays /big/checkpoints\n")
SCRIPT = """\
d='/r/a b'
if [ -L "$d" ]; then echo "stays $(readlink "$d")" && rm -f -- "$d"; exit; fi
[ -d "$d" ] || exit 0
for lock in "$d"/node-*/ddprun.lock "$d"/task-*/node-*/ddprun.lock; do
  if [ -e "$lock" ] && command -v flock >/dev/null && ! flock -n -s "$lock" true; then exit 75; fi
done
sum() { find "$@" -type f -links 1 -exec du -k {} + 2>/dev/null | awk '{ s += $1 } END { print s + 0 }'; }
echo "size $(sum "$d")"
echo "checkpoints $(sum "$d/checkpoints" "$d"/task-*/checkpoints)"
find "$d" -mindepth 1 -maxdepth 1 -type l -exec readlink {} \\; | sed 's/^/stays /'
"""
REMOVE = """\
find "$d" -mindepth 1 -maxdepth 1 ! -name run.json -exec rm -rf -- {} + && rm -rf -- "$d" || exit 73
"""


def test_one_script_for_all_places() -> None:
    assert run_store.disk_usage_script("'/r/a b'", dry_run=False) == SCRIPT + REMOVE
    assert run_store.disk_usage_script("'/r/a b'", dry_run=True) == SCRIPT.replace(' && rm -f -- "$d"', "")


def test_every_host_of_a_run_is_asked() -> None:
    (asked,), left = play(SshTarget(OPTIONS).remove(ON_HOSTS, dry_run=True), [(LOOKED, Output(returncode=0))])
    text = run_store.disk_usage_script('"$HOME"/.ddpctl/runs/night', dry_run=True)
    assert asked == tuple(
        Command(argv=("/bin/sh",), stdin=text, host=one.host, timeout_s=120.0, probe=True) for one in HOSTS
    )
    path = "~/.ddpctl/runs/night"
    assert left == (
        DiskUsage(path=path, host="box1", size=3_072_000, checkpoints=2_048_000, stays=("/big/checkpoints",)),
        DiskUsage(path=path, host="box2"),
    )
    (asked,), _ = play(SshTarget(OPTIONS).remove(ON_HOSTS, dry_run=False), [(LOOKED, LOOKED)])
    text = run_store.disk_usage_script('"$HOME"/.ddpctl/runs/night', dry_run=False)
    assert {(command.stdin, command.timeout_s, command.probe) for command in asked} == {(text, 1800.0, False)}
    assert left[0].holds("box1:~/.ddpctl/runs/night/checkpoints")
    assert left[1].holds("box1:~/.ddpctl/runs/night/checkpoints"), "one home may be that of many hosts"
    assert not left[0].holds("box1:~/.ddpctl/runs/night-2/checkpoints")


def test_slurm_is_asked_where_the_folder_is_not_that_of_the_record(wording: Wording) -> None:
    with pytest.raises(StopIteration) as nothing:
        next(SlurmTarget(SlurmOptions()).remove(ON_SLURM, dry_run=False))
    assert nothing.value.value == ()
    there = replace(ON_SLURM, handle=ON_SLURM.handle | {"dir": "/home/me/runs/night"})
    ((asked,),), left = play(SlurmTarget(SlurmOptions(login="me@hpc")).remove(there, dry_run=True), [(LOOKED,)])
    assert (asked.host, asked.stdin) == (
        Host(address="hpc", user="me"),
        run_store.disk_usage_script("/home/me/runs/night", dry_run=True),
    )
    assert [str(one) for one in left] == ["hpc:/home/me/runs/night"]
    renamed = replace(there, name="old")
    with pytest.raises(ConfigError) as error:
        play(SlurmTarget(SlurmOptions()).remove(renamed, dry_run=False), [])
    wording(error.value)


@pytest.mark.parametrize("kind", targets.kinds())
def test_a_target_has_the_verbs_of_its_capabilities(kind: str) -> None:
    target = targets._type(kind)
    for capability in ("pull", "suspend"):
        assert (capability in target.capabilities) == (getattr(target, capability) is not getattr(Target, capability))
    assert ("stop" in target.capabilities) == (target.exit_message is Target.exit_message)
    assert (target.remove is not Target.remove) == (kind in ("ssh", "slurm"))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        pytest.param(Output(returncode=75), UsageError, id="alive"),
        pytest.param(
            Output(returncode=73, stderr="rm: cannot remove '/r/a': Permission denied\n"), CannotWriteError, id="denied"
        ),
        pytest.param(Output(returncode=255, stderr="the host is gone"), UnavailableError, id="unreachable"),
        pytest.param(Output(returncode=2), CannotWriteError, id="silent"),
    ],
)
def test_what_went_wrong(said: Output, kind: type[DdpctlError], wording: Wording) -> None:
    with pytest.raises(DdpctlError) as error:
        run_store.read_disk_usage(said, "/r", "box1")
    assert type(error.value) is kind
    wording(error.value)


def run_script(folder: Path, *, dry_run: bool) -> subprocess.CompletedProcess[str]:
    command = run_store.disk_usage_command(f"'{folder}'", dry_run=dry_run)
    environ = {**os.environ, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command.argv, input=command.stdin, env=environ, capture_output=True, text=True, timeout=30)


def by_script(folder: Path, *, dry_run: bool) -> DiskUsage:
    done = run_script(Path(str(folder).replace("'", "'\\''")), dry_run=dry_run)
    said = Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
    return run_store.read_disk_usage(said, str(folder))


def here(folder: Path, *, dry_run: bool) -> DiskUsage:
    return run_store.local_disk_usage(str(folder), dry_run=dry_run)


@pytest.mark.parametrize("act", [by_script, here])
def test_no_link_is_followed(act: Callable[..., DiskUsage], tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "it's a run"
    (other / "deep").mkdir(parents=True)
    (other / "deep/kept.pt").write_bytes(b"x" * 10_000)
    (run / "node-0").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "node-0/up").symlink_to("../../other")
    (run / "node-0/twice").hardlink_to(other / "deep/kept.pt")
    (run / "checkpoints").symlink_to(other)
    (run / "-rf").write_text("")
    looked = act(run, dry_run=True)
    assert looked == DiskUsage(path=str(run), size=4096, stays=(str(other),))
    assert run.exists()
    assert act(run, dry_run=False) == looked
    assert not run.exists()
    assert (other / "deep/kept.pt").read_bytes() == b"x" * 10_000

    run.symlink_to(other)
    assert act(run, dry_run=False) == DiskUsage(path=str(run), stays=(str(other),))
    assert (run.is_symlink(), (other / "deep/kept.pt").exists()) == (False, True)
    assert act(run, dry_run=False) == DiskUsage(path=str(run))


@pytest.mark.parametrize("act", [by_script, here])
def test_a_node_that_is_alive_keeps_its_folder(act: Callable[..., DiskUsage], tmp_path: Path) -> None:
    (tmp_path / "night/node-0").mkdir(parents=True)
    lock = tmp_path / "night/node-0/ddprun.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="alive"):
            act(tmp_path / "night", dry_run=False)
    assert lock.exists()


def test_lost_runs_are_removed_together_and_signalled_only_if_anything_is_left(tmp_path: Path) -> None:
    asked: list[tuple[Command, ...]] = []

    def perform(verb: Verb[object]) -> object:
        commands = next(verb)
        while True:
            asked.append(commands)
            said = [LOOKED if "readlink" in str(one.stdin) else GONE for one in commands]
            try:
                commands = verb.send(tuple(said))
            except StopIteration as stop:
                return stop.value

    def remove(run: Run, *, remains: bool) -> list[set[str]]:
        """The first line of what each round asks."""
        state = RunStatus(run="", state="lost", message="", remains=remains)
        made = [removal.Removal(run=replace(run, folder=f"{tmp_path}/{n}"), state=state, left=()) for n in "abc"]
        asked.clear()
        executor = cast("Executor", SimpleNamespace(perform=perform))
        found = removal.remove_runs(AppContext(executor=executor, root=tmp_path, emit=print), made)
        assert not [one for one in found if isinstance(one, DdpctlError)]
        return [
            {str(one.stdin).splitlines()[0].partition("=")[0] for one in commands} for commands in asked if commands
        ]

    hosts = [{"address": one.address} for one in HOSTS]
    on_hosts = replace(ON_HOSTS, options={"hosts": hosts})
    assert remove(on_hosts, remains=False) == [{"d"}]
    assert len(asked[0]) == 6, "three runs on two hosts each"
    assert remove(on_hosts, remains=True) == [{"ids"}, {"d"}]
    there = replace(ON_SLURM, options={"login": "hpc"}, handle=ON_SLURM.handle | {"dir": "/home/me/runs/night"})
    assert remove(there, remains=False) == [{"d"}], "Slurm has ended what a job left"


def test_what_a_person_reads(wording: Wording) -> None:
    here = DiskUsage(path="/s/night", size=4096)
    there = DiskUsage(path="~/.ddpctl/runs/night", host="box1", size=3_072_000, checkpoints=2_048_000, stays=("/big",))
    wording("\n".join(formatting.removed_lines(ON_HOSTS, (there, here), dry_run=True)))
    shared = replace(ON_HOSTS, checkpoint_dir="box1:/data/night")
    wording("\n".join(formatting.removed_lines(shared, (here,), dry_run=False)))
