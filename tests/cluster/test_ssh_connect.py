"""Commands on other machines by real sshds on the loopback; no root is needed."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests.cluster.ssh_lab import MISSING, PACKAGES, PATH, Box, Person, box, fingerprint

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import ConfigError
from ddpctl.execution.executor import Executor
from ddpctl.targets import LogQuery
from ddpctl.targets.ssh import scripts
from ddpctl.targets.ssh.project import sync
from ddpwire.run_files import LOCK, NODE_LOG

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")


class Lab:
    """Two hosts, and an executor that may be made again."""

    def __init__(self, person: Person, boxes: tuple[Box, Box]) -> None:
        self.person, self.boxes = person, boxes
        self.executor = Executor({"HOME": str(person.home), "PATH": PATH, "PYTHONPATH": PACKAGES})

    def host(self, number: int = 0) -> Host:
        return Host(address=self.boxes[number].address, port=self.boxes[number].port)

    def run(self, *commands: Command) -> tuple[Output, ...]:
        def verb() -> Verb[tuple[Output, ...]]:
            return (yield commands)

        return self.executor.perform(verb())

    def configure(self, text: str) -> None:
        """Another ~/.ssh/config, and no connection left of before."""
        (self.person.home / ".ssh/config").write_text(text)
        self.executor.close()
        self.executor = Executor({"HOME": str(self.person.home), "PATH": PATH, "PYTHONPATH": PACKAGES})


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("PATH", PATH)
    person = Person(tmp_path / "me")
    with ExitStack() as stack:
        boxes = [
            stack.enter_context(box(tmp_path / name, person, address="127.0.0.1", port=free_port()))
            for name in ("box1", "box2")
        ]
        made = Lab(person, (boxes[0], boxes[1]))
        yield made
        made.executor.close()


def test_each_command_gets_its_own_output_exit_code_and_timeout(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    here = lab.host()
    text = "é" * 300_000
    outputs = lab.run(
        Command(argv=("/bin/sh",), stdin="echo $HOME; echo word >&2; exit 3\n", host=here),
        Command(argv=("cat",), stdin=text, host=here),
        Command(argv=("printf", "%s|", "a b", "it's", "$HOME"), env={"A": "1"}, cwd="/tmp", host=here),
        Command(argv=("sleep", "30"), timeout_s=0.5, host=here),
        Command(argv=("echo", "here")),
    )
    assert outputs == (
        Output(returncode=3, stdout=f"{lab.boxes[0].home}\n", stderr="word\n"),
        Output(returncode=0, stdout=text),
        Output(returncode=0, stdout="a b|it's|$HOME|"),
        Output(returncode=124, stderr="no answer within 0.5 s"),
        Output(returncode=0, stdout="here\n"),
    )
    many = [Command(argv=("/bin/sh",), stdin=f"echo {n}; echo e{n} >&2; exit {n}", host=here) for n in range(25)]
    expected = (Output(returncode=n, stdout=f"{n}\n", stderr=f"e{n}\n") for n in range(25))
    assert lab.run(*many) == tuple(expected), "more than the 10 sessions that an sshd allows"
    line = "for i in 1 2 3; do printf a; sleep 0.05; echo $0$i; done; echo e >&2; exit 4"
    streams = [Command(argv=("sh", "-c", line, name), mode="stream", host=here) for name in "xyz"]
    assert [output.returncode for output in lab.run(*streams)] == [4, 4, 4]
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == sorted(f"a{name}{i}" for name in "xyz" for i in "123")
    assert printed.err == "e\ne\ne\n"


def test_a_bar_and_a_prompt_of_a_lone_node_come_at_once(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    folder = lab.boxes[0].home / ".ddpctl/runs/night/node-0"
    folder.mkdir(parents=True)
    log = folder / NODE_LOG
    follow = scripts.logs("~/.ddpctl", "night", 0, {NODE_LOG: ""}, LogQuery(follow=True))
    with ThreadPoolExecutor(1) as pool, (folder / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = Command(argv=("/bin/sh",), stdin=follow, host=lab.host(), mode="stream", timeout_s=None)
        done = pool.submit(lab.run, command)
        for text in ("a line\n", "\r[node0 rank0]  45%|", "\r[node0 rank0]  46%|", "\n", "(Pdb) "):
            with log.open("a") as file:
                file.write(text)
            seen, deadline = "", time.monotonic() + 30
            while not seen.endswith(text):
                assert time.monotonic() < deadline, seen
                seen += capfd.readouterr().out
                time.sleep(0.02)
            assert seen == text
    assert done.result()[0].returncode == 0
    assert capfd.readouterr().out == "\n"


def test_every_hop_is_trusted_by_known_hosts_alone(lab: Lab) -> None:
    """Also a jump host, which Fabric would let in unasked; Include is heard."""
    gate, inner = lab.boxes
    jump = f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n"
    (lab.person.home / ".ssh/inner").write_text(
        f"Host inner\n  HostName 127.0.0.1\n  Port {inner.port}\n  ProxyJump gate\n"
    )
    ask = Command(argv=("sh", "-c", "echo $HOME"), host=Host(address="inner"))
    lab.configure(f"Include {lab.person.home}/.ssh/inner\n{jump}")
    assert lab.run(ask) == (Output(returncode=0, stdout=f"{inner.home}\n"),)

    lab.person.known_hosts.write_text("")
    lab.person.trusts(inner.known_name, inner.host_key)
    lab.configure(f"Include {lab.person.home}/.ssh/inner\n{jump}")
    (refused,) = lab.run(ask)
    assert (refused.returncode, refused.stdout) == (255, "")
    assert "jump host gate" in refused.stderr
    assert fingerprint(gate.host_key) in refused.stderr
    assert "known_hosts" in refused.stderr

    lab.person.trusts("the-gate", gate.host_key)
    lab.configure(f"Include {lab.person.home}/.ssh/inner\n{jump}  HostKeyAlias the-gate\n")
    assert lab.run(ask)[0].returncode == 0

    lab.configure(f"Include {lab.person.home}/.ssh/inner\n{jump}  HostKeyAlias the-gate\n  ProxyJump inner\n")
    assert "inner -> gate -> inner" in lab.run(ask)[0].stderr


def test_a_lost_connection_is_made_anew(lab: Lab) -> None:
    """A host that went away in the middle answers 255; one that is back is asked as if nothing had been."""
    here = lab.host()
    (pid,) = lab.run(Command(argv=("sh", "-c", "echo $PPID"), host=here))
    (lost,) = lab.run(Command(argv=("sh", "-c", "kill -9 $PPID; sleep 30"), host=here))
    assert lost.returncode == 255
    started = time.monotonic()
    (again,) = lab.run(Command(argv=("sh", "-c", "echo $PPID"), host=here))
    assert (again.returncode, again.stdout != pid.stdout) == (0, True)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("tools", ["all", "neither rsync nor zstd"])
def test_a_project_is_sent_by_content(tools: str, lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if tools != "all":
        (tmp_path / "bin").mkdir()
        for path in Path("/usr/bin").iterdir():
            if path.name not in ("rsync", "zstd"):
                (tmp_path / "bin" / path.name).symlink_to(path)
        lab.executor = Executor({"HOME": str(lab.person.home), "PATH": str(tmp_path / "bin"), "PYTHONPATH": PACKAGES})
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    (project / "pkg dir/below").mkdir(parents=True)
    (project / "pkg dir/below/x").write_text("x")
    scratch.mkdir()
    (project / "train.py").write_text("print(1)\n")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "pkg dir/it's é.py").write_bytes(bytes(range(256)))
    (project / "large").write_bytes(os.urandom(3_000_000))
    (project / "link").symlink_to("train.py")
    (project / ".hidden").mkdir()
    (project / ".hidden/x").write_text("no")
    (project / "runs").mkdir()
    (project / "runs/log").write_text("no")
    (project / ".ddpignore").write_text("runs/\n")
    hosts = [lab.host(0), lab.host(1)]
    moved: list[Command] = []

    def watched(run: str) -> Verb[None]:
        verb = sync(hosts, cwd=str(project), home="~/.ddpctl", run=run, run_dir=str(scratch))
        commands = next(verb)
        try:
            while True:
                moved.extend(command for command in commands if command.transfer or "base64 -d" in str(command.argv))
                commands = verb.send((yield commands))
        except StopIteration:
            return

    def arrived(number: int, run: str) -> dict[str, bytes]:
        folder = lab.boxes[number].home / ".ddpctl/runs" / run / "project"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def files() -> dict[str, bytes]:
        """What goes."""
        names = [path for path in project.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(project)): path.read_bytes()
            for path in names
            if not str(path.relative_to(project)).startswith((".hidden", ".ddpignore", "runs"))
        }

    first = files()
    lab.executor.perform(watched("first"))
    assert [arrived(number, "first") for number in (0, 1)] == [first, first]
    assert (lab.boxes[1].home / ".ddpctl/runs/first/project/link").readlink() == Path("train.py")
    assert [command.host for command in moved] == hosts
    output = capfd.readouterr().err
    assert "project: 6 files, 3.0 MB; left out: " in output
    assert "runs/log (.ddpignore)" in output
    assert "sending 12 files, 6.0 MB, to 2 hosts" in output
    assert list(scratch.iterdir()) == []
    moved.clear()

    (project / "pkg dir/it's é.py").unlink()
    lab.executor.perform(watched("second"))
    assert moved == []  # what is there is not sent again
    assert arrived(1, "second") == files()
    assert "every host has it already" in capfd.readouterr().err

    (project / "train.py").write_text("print(2)\n")
    (project / "run.sh").chmod(0o755)
    shutil.rmtree(project / "pkg dir")
    (project / "pkg dir").write_text("a file where a folder was, and one in that")
    lab.executor.perform(watched("third"))
    assert [arrived(number, "third") for number in (0, 1)] == [files(), files()]
    assert os.access(lab.boxes[0].home / ".ddpctl/runs/third/project/run.sh", os.X_OK)
    assert arrived(0, "first") == first  # a run keeps what it was started with
    moved.clear()

    with (project / "large").open("r+b") as file:
        file.write(b"changed")
    lab.executor.perform(watched("fourth"))
    assert [arrived(number, "fourth") for number in (0, 1)] == [files(), files()]
    by_rsync = bool(shutil.which("rsync")) and tools == "all"
    assert [command.transfer is not None and command.transfer.rsync_to is not None for command in moved] == [
        by_rsync
    ] * 2

    with (project / "data").open("wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(ConfigError) as error:
        lab.executor.perform(watched("fifth"))
    assert error.value.fields == {"num_bytes": sum(path.lstat().st_size for path in map(project.joinpath, files()))}
    assert not (lab.boxes[0].home / ".ddpctl/runs/fifth").exists()
