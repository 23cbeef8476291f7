"""ddpctl rm: what it runs in each place, what it makes of the answers, and whom it refuses."""

import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.unit.ddpctl.ssh_answers import HOSTS
from tests.unit.ddpctl.ssh_answers import RUN as ON_HOSTS
from tests.unit.ddpctl.test_launcher_removal import LOOKED, by_script, disk_usage
from tests.unit.ddpctl.test_slurm_target import RUN as ON_SLURM

from ddpctl import targets
from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, UsageError
from ddpctl.execution.executor import Executor
from ddpctl.operations import removal
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import DiskUsage, Run
from ddpctl.targets import Target

GONE = Output(returncode=0, stdout='{"alive": false}\n')


def test_slurm_is_asked_where_the_folder_is_not_that_of_the_record(tmp_path: Path) -> None:
    on_slurm = replace(
        ON_SLURM, folder=str(tmp_path / "night"), handle=ON_SLURM.handle | {"dir": str(tmp_path / "night")}
    )
    assert disk_usage(on_slurm, dry_run=False) == ([], (DiskUsage(path=on_slurm.folder),))
    moved = replace(on_slurm, options={"login": "me@hpc"}, handle=on_slurm.handle | {"dir": "/home/me/runs/night"})
    (commands,), remaining = disk_usage(moved, LOOKED, dry_run=True)
    assert (commands.host, commands.stdin) == (
        Host(address="hpc", user="me"),
        removal.disk_usage_script("/home/me/runs", ["night"], dry_run=True),
    )
    assert [str(command) for command in remaining] == ["hpc:/home/me/runs/night", moved.folder]
    _, error = disk_usage(replace(moved, name="old"), dry_run=False)
    assert isinstance(error, ConfigError)
    assert "/home/me/runs/night" in str(error)


@pytest.mark.parametrize("kind", targets.kinds())
def test_a_target_has_the_verbs_of_its_capabilities(kind: str) -> None:
    target = targets._type(kind)
    for capability in ("pull", "suspend"):
        assert (capability in target.capabilities) == (getattr(target, capability) is not getattr(Target, capability))
    assert ("stop" in target.capabilities) == (target.exit_message is Target.exit_message)
    assert (target.roots is not Target.roots) == (kind in ("ssh", "slurm"))


def test_a_folder_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    names = ["one", "stuck", "three"]
    for name in names:
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / "checkpoints/a b").write_bytes(b"x" * 5000)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rm").write_text(
        '#!/bin/sh\ncase "$*" in *stuck*) echo note >&2; echo \'rm: busy\' >&2; exit 1 ;; esac\nexec /bin/rm "$@"\n'
    )
    (tmp_path / "bin/rm").chmod(0o755)
    text = removal.disk_usage_script(str(tmp_path / "runs"), [*names, "none"], dry_run=False)
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=text, env=environ, capture_output=True, text=True, timeout=60)
    output = Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
    usage, three, none = (removal.read_disk_usage(output, "/runs", name) for name in ("one", "three", "none"))
    assert usage.size == usage.checkpoints == three.size == 8192
    assert none == DiskUsage(path="/runs/none")
    with pytest.raises(CannotWriteError, match="/runs/stuck was not removed: rm: busy"):
        removal.read_disk_usage(output, "/runs", "stuck")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["stuck"]


def test_lost_runs_are_removed_together_and_signalled_only_if_anything_is_left(tmp_path: Path) -> None:
    requests: list[tuple[Command, ...]] = []

    def perform(verb: Verb[object]) -> object:
        output: list[Output] | None = None
        while True:
            try:
                commands = next(verb) if output is None else verb.send(tuple(output))
            except StopIteration as stop:
                return stop.value
            requests.append(commands)
            output = [LOOKED if "readlink" in str(command.stdin) else GONE for command in commands]

    def remove(run: Run, *, remains: bool) -> list[set[str]]:
        """The first line of what each round asks elsewhere."""
        state = RunStatus(run="", state="lost", message="", remains=remains)
        runs = [
            replace(run, name=n, folder=f"{tmp_path}/{n}", handle=run.handle | {"dir": f"/runs/{n}"}) for n in "abc"
        ]
        made = [removal.Removal(run=lost, state=state, folders=()) for lost in runs]
        requests.clear()
        executor = cast("Executor", SimpleNamespace(perform=perform))
        removed = removal.remove_runs(AppContext(executor=executor, root=tmp_path, emit=print), made)
        assert not [result for result in removed if isinstance(result, DdpctlError)]
        return [
            {str(command.stdin).splitlines()[0].partition("=")[0] for command in commands}
            for commands in requests
            if any(command.host for command in commands)
        ]

    hosts = [{"address": host.address} for host in HOSTS]
    on_hosts = replace(ON_HOSTS, options={"hosts": hosts})
    assert remove(on_hosts, remains=False) == [{"dry_run"}]
    assert len(requests[-2]) == 2, "three runs on two hosts"
    assert remove(on_hosts, remains=True) == [{"ids"}, {"dry_run"}]
    on_cluster = replace(ON_SLURM, options={"login": "hpc"})
    assert remove(on_cluster, remains=False) == [{"dry_run"}], "Slurm has ended what a job left"


def test_a_fifo_in_the_place_of_a_lock_does_not_hang(tmp_path: Path) -> None:
    folder = tmp_path / "night"
    (folder / "node-0").mkdir(parents=True)
    os.mkfifo(folder / "node-0" / "ddprun.lock")
    assert by_script(folder, dry_run=False) == DiskUsage(path=str(folder))
    assert not folder.exists()


@pytest.mark.parametrize(("age_s", "is_removed"), [(5, False), (300, True)])
def test_without_file_locks_the_record_of_a_node_that_is_alive_keeps_its_folder(
    age_s: int, is_removed: bool, tmp_path: Path
) -> None:
    (tmp_path / "night/node-0").mkdir(parents=True)
    (tmp_path / "night/node-0/ddprun.lock").touch()
    owner = tmp_path / "night/node-0/ddprun.lock.owner"
    owner.touch()
    os.utime(owner, (time.time() - age_s,) * 2)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flock").write_text("#!/bin/sh\nexit 71\n")
    (tmp_path / "bin/flock").chmod(0o755)
    with nullcontext() if is_removed else pytest.raises(UsageError, match="a live node"):
        by_script(tmp_path / "night", dry_run=False, path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert (tmp_path / "night").exists() != is_removed
