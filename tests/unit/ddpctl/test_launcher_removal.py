"""ddpctl rm: what it runs in each place, what it makes of the answers, and whom it refuses."""

import fcntl
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.answers import OK, perform
from tests.unit.ddpctl.ssh_answers import HOSTS, by_host
from tests.unit.ddpctl.ssh_answers import RUN as ON_HOSTS

from ddpctl.command import Command, Host, Output
from ddpctl.commands import formatting
from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError, UsageError
from ddpctl.operations import removal
from ddpctl.runs import run_store
from ddpctl.runs.run_store import DiskUsage, Run
from ddpctl.targets.ssh import claims, scripts

LOOKED = Output(
    returncode=0,
    stdout="./night\tstays\t/big/checkpoints\n./night\tsize\t3000\n./night\tcheckpoints\t2000\n./day\tsize\t7\n",
)


def disk_usage(run: Run, *answers: Output, dry_run: bool) -> tuple[list[Command], Any]:
    """What is asked elsewhere about a run, and its folders or the error. Several answers are those of the hosts."""
    output = by_host(*answers) if len(answers) > 1 else answers[0] if answers else {}
    here = f"\ncd {Path(run.folder).parent} "
    commands, (usage,) = perform(removal._disk_usage([run], dry_run=dry_run), {here: OK, "": output})
    return [command for command in commands if here not in str(command.stdin)], usage


def test_every_host_of_a_run_is_asked(tmp_path: Path) -> None:
    on_hosts = replace(ON_HOSTS, options={"hosts": [asdict(host) for host in HOSTS]}, folder=str(tmp_path / "night"))
    commands, remaining = disk_usage(on_hosts, LOOKED, Output(returncode=0), dry_run=True)
    text = removal.disk_usage_script("~/.ddpctl/runs", ["night"], dry_run=True)
    assert commands == [
        Command(argv=("/bin/sh",), stdin=text, host=host.host, timeout_s=120.0, probe=True) for host in HOSTS
    ]
    path = "~/.ddpctl/runs/night"
    assert remaining == (
        DiskUsage(path=path, host="box1", size=3_072_000, checkpoints=2_048_000, stays=("/big/checkpoints",)),
        DiskUsage(path=path, host="box2"),
        DiskUsage(path=on_hosts.folder),
    )
    commands, _ = disk_usage(on_hosts, LOOKED, LOOKED, dry_run=False)
    text = claims.remove_invalid(scripts.claims_folder("~/.ddpctl"))
    text = removal.disk_usage_script("~/.ddpctl/runs", ["night"], dry_run=False, outside=text)
    assert {(command.stdin, command.timeout_s, command.probe) for command in commands} == {(text, 1800.0, False)}
    own, other = (run_store.folders_above(f"box1:~/.ddpctl/runs/{name}/checkpoints") for name in ("night", "night-2"))
    assert remaining[0].names & own
    assert remaining[1].names & own, "one home may be that of many hosts"
    assert not remaining[0].names & other
    _, gone = disk_usage(on_hosts, LOOKED, Output(returncode=255, stderr="the host is gone"), dry_run=False)
    assert_names(gone, "box2", on_hosts.folder)


@pytest.mark.parametrize(
    ("output", "kind", "cause"),
    [
        pytest.param(Output(returncode=0, stdout="./r\theld\t\n"), UsageError, "live node", id="alive"),
        pytest.param(
            Output(returncode=0, stdout="./r\tfailed\trm: cannot remove '/r/a': Permission denied\n"),
            CannotWriteError,
            "'/r/a': Permission denied",
            id="denied",
        ),
        pytest.param(
            Output(returncode=255, stderr="the host is gone"), UnavailableError, "the host is gone", id="unreachable"
        ),
        pytest.param(Output(returncode=2), CannotWriteError, "2", id="silent"),
    ],
)
def test_a_folder_that_was_not_removed_is_named_with_its_cause(
    output: Output, kind: type[DdpctlError], cause: str
) -> None:
    with pytest.raises(DdpctlError) as error:
        removal.read_disk_usage(output, "", "r", Host(address="box1"))
    assert type(error.value) is kind
    assert ("box1:/r " in str(error.value), cause in str(error.value)) == (True, True)


def by_script(folder: Path, *, dry_run: bool, path: str = "/usr/bin:/bin") -> DiskUsage:
    text = removal.disk_usage_script(str(folder.parent), [folder.name], dry_run=dry_run)
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(["/bin/sh"], input=text, env=environ, capture_output=True, text=True, timeout=30)
    output = Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
    return removal.read_disk_usage(output, str(folder.parent), folder.name)


def test_no_link_is_followed(tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "it's a run"
    (other / "deep").mkdir(parents=True)
    (other / "deep/kept.pt").write_bytes(b"x" * 10_000)
    (run / "node-0").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "node-0/up").symlink_to("../../other")
    (run / "node-0/twice").hardlink_to(other / "deep/kept.pt")
    (run / "checkpoints").symlink_to(other)
    (run / "-rf").write_text("")
    os.mkfifo(run / "node-0/ddprun.lock")  # nobody waits for a lock of what is no file
    looked = by_script(run, dry_run=True)
    assert looked == DiskUsage(path=str(run), size=4096, stays=(str(other),))
    assert run.exists()
    assert by_script(run, dry_run=False) == looked
    assert not run.exists()
    assert (other / "deep/kept.pt").read_bytes() == b"x" * 10_000

    run.symlink_to(other)
    assert by_script(run, dry_run=False) == DiskUsage(path=str(run), stays=(str(other),))
    assert (run.is_symlink(), (other / "deep/kept.pt").exists()) == (False, True)
    assert by_script(run, dry_run=False) == DiskUsage(path=str(run))


def test_a_node_that_is_alive_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "night/node-0").mkdir(parents=True)
    lock = tmp_path / "night/node-0/ddprun.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="a live node"):
            by_script(tmp_path / "night", dry_run=False)
        on_hosts = replace(ON_HOSTS, options={"hosts": [asdict(HOSTS[0])]}, folder=str(tmp_path / "night"))
        _, usage = disk_usage(on_hosts, OK, dry_run=False)
        assert isinstance(usage, UsageError)
    assert lock.exists()


def test_rm_lists_the_folders_the_bytes_and_what_is_kept() -> None:
    here = DiskUsage(path="/s/night", size=4096)
    usage = DiskUsage(path="~/.ddpctl/runs/night", host="box1", size=3_072_000, checkpoints=2_048_000, stays=("/big",))
    total, *folders = formatting.removed_lines(ON_HOSTS, (usage, here), dry_run=True)
    assert ("night" in total, "3.1 MB" in total, "2.0 MB" in total) == (True, True, True)
    assert [line.split(maxsplit=1)[0] for line in folders] == ["folder", "folder", "kept"]
    assert [line.split()[1] for line in folders] == ["box1:~/.ddpctl/runs/night", "/s/night", "/big"]
    shared = replace(ON_HOSTS, checkpoint_dir="box1:/data/night")
    total, *folders = formatting.removed_lines(shared, (here,), dry_run=False)
    assert "4.1 kB" in total
    assert [line.split()[:2] for line in folders] == [["folder", "/s/night"], ["kept", "box1:/data/night"]]


def test_files_that_a_script_has_made_in_its_copy_of_the_project_are_named(tmp_path: Path) -> None:
    run = tmp_path / "r"
    (run / "project/data").mkdir(parents=True)
    for folder in ("__pycache__", "a\n."):
        (run / "project" / folder).mkdir()
    for name in ("sent.py", "changed.py"):
        (run / "project" / name).write_text(name)
        os.utime(run / "project" / name, (1, 1))
    (run / "project.list").write_text("./changed.py\n./sent.py\n")
    os.utime(run / "project.list", (10, 10))
    for name in ("changed.py", "net.pth", "data/it's old", "__pycache__/sent.pyc", "a\n./b"):
        (run / "project" / name).write_text(name)
    os.utime(run / "project/data/it's old", (1, 1))  # as an archive unpacks it
    expected = "3 files: project/changed.py, project/data/it's old, project/net.pth"
    assert by_script(run, dry_run=True).made == expected
    assert by_script(run, dry_run=False).made == expected
    assert not run.exists()
