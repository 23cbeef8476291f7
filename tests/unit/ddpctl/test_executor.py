"""Commands as the lines of a shell, their executor with real processes, and the variables that a tool gets."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.answers import OK
from tests.unit.ddpctl.slurm_standins import StandIns

from ddpctl.command import Command, FilePart, Host, Output, Transfer, Verb, call, once, remote_line, shell_line
from ddpctl.environment import ignored_options, is_removed
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.execution import executor
from ddpctl.execution.executor import Executor
from ddpctl.job.spec import JobSpec
from ddpctl.targets.slurm.options import SlurmOptions

PYTHON = sys.executable


def all_of(*commands: Command) -> Verb[tuple[Output, ...]]:
    return (yield commands)


def run(*commands: Command) -> tuple[Output, ...]:
    return Executor(os.environ).perform(all_of(*commands))


def python(code: str, **fields: object) -> Command:
    return Command(argv=(PYTHON, "-c", code), **fields)  # type: ignore[arg-type]


def test_a_function_is_called_instead_of_a_program_and_its_errors_are_those_of_a_command(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ConfigError("no", hint="mend it")

    read, missing, refused = run(call(len, "abc"), call((tmp_path / "gone").read_text), call(refuse))
    assert (read.returncode, read.value) == (0, 3)
    assert (missing.returncode, str(tmp_path / "gone") in missing.stderr) == (73, True)
    assert (refused.returncode, refused.stderr) == (78, "no: mend it")


def test_the_outputs_of_commands_side_by_side_are_in_the_order_of_the_commands() -> None:
    slow = python("import time; time.sleep(0.3); print('slow')")
    quick = python("import os, sys; print(os.environ['A']); print('err', file=sys.stderr); sys.exit(3)", env={"A": "b"})
    assert run(slow, quick) == (
        Output(returncode=0, stdout="slow\n"),
        Output(returncode=3, stdout="b\n", stderr="err\n"),
    )


def test_a_missing_program_and_one_that_takes_too_long_have_codes_and_one_that_cannot_be_run_is_named(
    tmp_path: Path,
) -> None:
    missing, slow = run(Command(argv=("no-such-program",)), python("import time; time.sleep(20)", timeout_s=0.2))
    assert (missing.returncode, slow.returncode, missing.stdout + slow.stdout) == (127, 124, "")
    assert missing.stderr.startswith("no-such-program: ")
    assert "0.2 s" in slow.stderr
    (tmp_path / "script").write_text("echo")
    with pytest.raises(UnavailableError, match=f"{tmp_path / 'script'}: Permission denied"):
        run(Command(argv=(str(tmp_path / "script"),)))


def test_a_dry_run_runs_probes_and_prints_the_rest(tmp_path: Path) -> None:
    made = tmp_path / "made"
    out = io.StringIO()
    outputs = Executor(os.environ).dry_run(
        all_of(
            python("print('looked')", probe=True),
            Command(
                argv=("touch", str(made)), env={"A": "b c"}, cwd="/x", mode="background", output="o", placeholder="<p>"
            ),
        ),
        out,
    )
    assert outputs == (Output(returncode=0, stdout="looked\n"), Output(returncode=0, stdout="<p>"))
    assert out.getvalue() == f"cd /x && A='b c' touch {made} >o 2>&1 &\n"
    assert not made.exists()


TETHERED = """
import os, sys
fd = int(os.environ["DDP_LIFELINE_FD"])
print("up", flush=True)
os.read(fd, 1)
print("the lifeline is cut", flush=True)
"""
LAUNCHER = """
import os, sys, time
from ddpctl.command import Command
from ddpctl.execution.executor import Executor
def verb():
    yield (Command(argv=(sys.executable, "-c", sys.argv[1]), mode="background", output=sys.argv[2], tether=True),)
Executor(os.environ).perform(verb())
time.sleep(60)
"""


def test_a_message_is_printed_once_and_handed_on_until_it_no_longer_holds(capfd: pytest.CaptureFixture[str]) -> None:
    executor, heard = Executor(os.environ), []
    executor.on_say = heard.append

    def verb() -> Verb[None]:
        for say in ("waiting for box1", "waiting for box1", "", "waiting for box2"):
            yield (Command(argv=("true",), say=say),)

    executor.perform(verb())
    assert heard == ["waiting for box1", "", "waiting for box2"]
    assert capfd.readouterr().err == "waiting for box1\nwaiting for box2\n"


def test_a_tethered_command_ends_with_its_launcher(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "log"
    launcher = subprocess.Popen([PYTHON, "-c", LAUNCHER, TETHERED, str(output)])
    try:
        until(lambda: output.exists() and output.read_text() == "up\n", 20)
        launcher.send_signal(signal.SIGKILL)
        until(lambda: output.read_text() == "up\nthe lifeline is cut\n", 20)
    finally:
        launcher.kill()
        launcher.wait()


def test_a_command_reads_what_it_is_given_and_a_dry_run_shows_it_unless_it_is_secret() -> None:
    out = io.StringIO()

    def verb() -> Verb[str]:
        (plain, secret) = yield (
            Command(argv=("/bin/cat",), stdin="one\n"),
            Command(argv=("/bin/cat",), stdin="canary", secret=True),
        )
        return plain.stdout + secret.stdout

    assert Executor({}).perform(verb()) == "one\ncanary"
    Executor({}).dry_run(verb(), out)
    redacted = "/bin/cat <<'END_OF_INPUT'\n[REDACTED]\nEND_OF_INPUT\n"
    assert out.getvalue() == f"/bin/cat <<'END_OF_INPUT'\none\nEND_OF_INPUT\n{redacted}"


@pytest.mark.parametrize("mode", ["capture", "stream"])
def test_no_child_is_forked_in_the_main_thread(mode: str) -> None:
    """There Python would drop the KeyboardInterrupt of a Ctrl-C that comes during the fork."""
    threads: list[threading.Thread] = []
    os.register_at_fork(before=lambda: threads.append(threading.current_thread()))
    run(Command(argv=(PYTHON, "-c", ""), mode=mode))  # type: ignore[arg-type]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_ctrl_c_while_a_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not know such a thread, and would wait for it at the end of ddpctl, for ever."""
    threads: list[threading.Thread] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        begin(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    machine = Executor(os.environ)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert machine.perform(once(python(""))).returncode == 0
    assert threads == [], "what starts children has its thread from the beginning"
    with pytest.raises(KeyboardInterrupt) as interrupt:
        machine.perform(all_of(python(""), python("")))
    threads[0].join(10)
    assert not threads[0].is_alive()
    del interrupt  # its traceback has kept the pool, as ddpctl does until its end


@pytest.mark.parametrize("mode", ["capture", "background"])
def test_ctrl_c_in_the_terminal_reaches_only_ddpctl(mode: str, tmp_path: Path) -> None:
    """A command has a session of its own."""
    path = tmp_path / "session"
    code = f"import os, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getsid(0) == os.getpid()))"
    (output,) = run(python(code, mode=mode))
    if mode == "background":
        os.waitpid(int(output.stdout), 0)
    assert path.read_text() == "True"


def test_a_second_ctrl_c_during_the_first_is_not_lost() -> None:
    handled = []

    def stop(error: KeyboardInterrupt) -> None:
        handled.append(error.args)
        if len(handled) == 1:
            raise KeyboardInterrupt("second")

    executor._handle_interrupt(stop, KeyboardInterrupt("first"))
    assert handled == [("first",), ("second",)]


def test_a_transfer_sends_its_part_of_a_file_and_counts_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blob").write_bytes(b"abcde")
    done: list[int] = []
    monkeypatch.setattr(executor.Display, "update", lambda _, __, num_bytes, ___: done.append(num_bytes))
    part = FilePart(path=str(tmp_path / "blob"), start=2, length=3)
    moved = Transfer(num_bytes=3, num_files=1, reads=part)
    argv = ("/bin/sh", "-c", "/bin/cat >received; echo")
    run(Command(argv=argv, cwd=str(tmp_path), transfer=moved))
    assert ((tmp_path / "received").read_bytes(), done[-1]) == (b"cde", 3)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_CHILD_SUBREAPER")
def test_after_an_interruption_what_a_command_has_left_behind_is_killed(tmp_path: Path) -> None:
    inner = (
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        os.kill(int(sys.argv[1]), signal.SIGINT)\n"
        f"        os.symlink(str(os.getpid()), {str(tmp_path / 'pid')!r})\n"
        "    signal.pause()\n"
        f"while not os.path.islink({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
        "sys.exit(99)\n"
    )
    outer = (
        "import os, sys\n"
        "from ddpctl.command import Command\n"
        "from ddpctl.execution.executor import Executor\n"
        "def verb():\n"
        f"    argv = (sys.executable, '-c', {inner!r}, str(os.getpid()))\n"
        "    return (yield (Command(argv=argv, mode='tty', kills_orphans=True),))\n"
        "print(Executor(os.environ).perform(verb())[0].returncode)\n"
    )
    done = subprocess.run((PYTHON, "-c", outer), capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout, done.stderr) == ("99\n", "")
    assert not Path(f"/proc/{(tmp_path / 'pid').readlink()}").exists()


def test_a_streamed_command_reads_its_text(capfd: pytest.CaptureFixture[str]) -> None:
    Executor({"PATH": "/usr/bin:/bin"}).perform(
        all_of(Command(argv=("cat",), stdin="a\udc80\n" * 50_000, mode="stream"))
    )
    assert capfd.readouterr().out.count("\n") == 50_000


BOX = Host(address="box1", user="alice", port=2222, key="/keys/box")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (Command(argv=("echo", "a b")), "echo 'a b'"),
        (Command(argv=("true",), host=Host(address="box1")), "ssh -- box1 true"),
        (
            Command(argv=("echo", "a b"), env={"A": "1 2"}, cwd="/x y", host=BOX),
            "ssh -l alice -p 2222 -i /keys/box -- box1 "
            """'cd '"'"'/x y'"'"' && A='"'"'1 2'"'"' echo '"'"'a b'"'"''""",
        ),
        (Command(argv=("top",), host=BOX, mode="tty"), "ssh -l alice -p 2222 -i /keys/box -t -- box1 top"),
        (
            Command(argv=("/bin/sh",), stdin="date\n", host=Host(address="box1")),
            "ssh -- box1 /bin/sh <<'END_OF_INPUT'\ndate\nEND_OF_INPUT",
        ),
        (
            Command(argv=("/bin/sh",), stdin="x=secret\n", secret=True, host=Host(address="box1")),
            "ssh -- box1 /bin/sh <<'END_OF_INPUT'\n[REDACTED]\nEND_OF_INPUT",
        ),
    ],
)
def test_a_command_is_a_line_that_a_person_can_type(command: Command, line: str) -> None:
    assert shell_line(command) == line


def test_a_host_has_an_optional_user_and_port_and_a_text_that_is_no_host_is_refused() -> None:
    hosts = {
        "box1": Host(address="box1"),
        "alice@box1:2222": Host(address="box1", user="alice", port=2222),
        "me@10.0.0.7": Host(address="10.0.0.7", user="me"),
        "[fe80::1]:22": Host(address="fe80::1", port=22),
    }
    assert {text: Host.from_text(text) for text in hosts} == hosts
    for text in ("", "-oProxyCommand=x", "box1:0", "box1:65536", "a b", "me@", "@box1"):
        with pytest.raises(ValueError, match="USER@"):
            Host.from_text(text)


PATH = os.environ["PATH"]
REMOVED = {
    "SQUEUE_PARTITION": "gpu",
    "SBATCH_WAIT": "1",
    "SACCT_FORMAT": "x",
    "SCANCEL_STATE": "PENDING",
    "SLURM_TIME_FORMAT": "relative",
    "GIT_DIR": "/elsewhere",
    "RSYNC_RSH": "rsh",
    "ANSIBLE_CHECK_MODE_MARKERS": "1",
    "COMPOSE_FILE": "/elsewhere",
    "SSH_ASKPASS": "/bin/false",
    "SRUN_EXPORT_ENV": "NONE",
    "SLURM_STDOUTMODE": "/dev/null",
    "TAR_OPTIONS": "--exclude=*",
}
KEPT = {
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_CLUSTERS": "a,b",
    "SLURM_JOB_ID": "7",
    "KUBECONFIG": "/k",
    "DOCKER_HOST": "ssh://box",
    "SSH_AUTH_SOCK": "/agent",
    "ANSIBLE_SSH_ARGS": "-F /config",
    "ANSIBLE_SSH_COMMON_ARGS": "-J gate",
    "ANSIBLE_SSH_CONTROL_PATH_DIR": "/short",
    "ANSIBLE_VAULT_PASSWORD_FILE": "/password",
    "PIP_INDEX_URL": "https://mirror",
    "https_proxy": "proxy:1",
    "LANG": "C",
    "MY_SQUEUE_PARTITION": "mine",
}
ALL = {**REMOVED, **KEPT, "PATH": PATH}


def variables(text: str) -> dict[str, str]:
    pairs = dict(line.partition("=")[::2] for line in text.splitlines())
    return {name: value for name, value in pairs.items() if name in ALL}


def test_a_tool_on_this_machine_gets_where_and_who_but_no_filters_and_options() -> None:
    output = Executor(ALL).perform(once(Command(argv=("sh", "-c", "env"), env={"RSYNC_RSH": "ssh"})))
    assert variables(output.stdout) == {**KEPT, "PATH": PATH, "RSYNC_RSH": "ssh"}, "a command's own variables count"
    assert [name for name in ALL if is_removed(name)] == list(REMOVED)
    output = Executor(ALL).perform(once(Command(argv=("printenv", "GIT_DIR"))))
    assert output == Output(returncode=0, stdout="/elsewhere\n"), "printenv reads the user's own variables"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_tool_on_another_machine_gets_the_same(shell: str) -> None:
    command = Command(argv=("env",), host=Host(address="box"), env={"A": "b c"}, cwd="/")
    done = subprocess.run([shell, "-c", remote_line(command)], env=ALL, capture_output=True, text=True, check=True)
    assert variables(done.stdout) == {**KEPT, "PATH": PATH}
    assert "A=b c" in done.stdout.splitlines()
    assert "PWD=/" in done.stdout.splitlines()


def test_no_shell_stays_between_a_host_and_its_command() -> None:
    command = Command(argv=("sh", "-c", 'kill -0 "$PPID" && echo "$PPID"'), host=Host(address="box"))
    line = ["/bin/sh", "-c", f"exec {remote_line(command)}"]
    done = subprocess.run(line, env=ALL, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(os.getpid()), "a script that watches its parent watches sshd"


def test_the_environment_of_a_node_is_that_of_its_user(tmp_path: Path) -> None:
    executor, path = Executor(ALL), tmp_path / "out"
    output = executor.perform(once(Command(argv=("env",), mode="background", output=str(path))))
    os.waitpid(int(output.stdout), 0)
    assert variables(path.read_text()) == ALL
    assert output.returncode == OK.returncode


def test_a_variable_of_sbatch_that_contradicts_the_file_is_named() -> None:
    listing = "A=SBATCH_QOS=x\nSBATCH_PARTITION=gpu\nSBATCH_ACCOUNT=me\nSBATCH_WAIT=1\nSBATCH_QOS=low\nPATH=/bin\n"
    ignored = ignored_options(listing, ("--partition=gpu", "--qos=high"))
    assert re.findall(r"SBATCH_\w+=\w+", ignored) == ["SBATCH_ACCOUNT=me", "SBATCH_WAIT=1", "SBATCH_QOS=low"]
    assert ignored_options("SBATCH_QOS=high\nPATH=/bin\n", ("--qos=high",)) == ""


def test_slurm_s_programs_in_a_batch_job_do_not_get_the_user_s_filters(tmp_path: Path) -> None:
    job = JobSpec(name="train", nodes="2", gpus=2, command=("train.py",))
    (tmp_path / "train.py").touch()
    done = StandIns(tmp_path / "site").run(job, SlurmOptions(), SQUEUE_STATES="PENDING", SCANCEL_STATE="PENDING")
    calls = done.of("srun")
    assert calls
    assert [name for call in calls for name in call.env if name.startswith(("SQUEUE_", "SCANCEL_"))] == []
