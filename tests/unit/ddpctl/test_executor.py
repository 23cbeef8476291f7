"""The executor, with real processes."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddpctl.command import Command, Output, Verb, call
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.execution.executor import Executor

PYTHON = sys.executable


def once(*commands: Command) -> Verb[tuple[Output, ...]]:
    return (yield commands)


def run(*commands: Command) -> tuple[Output, ...]:
    return Executor(os.environ).perform(once(*commands))


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


def test_a_missing_program_and_one_that_takes_too_long_have_the_codes_of_a_shell() -> None:
    missing, slow = run(Command(argv=("no-such-program",)), python("import time; time.sleep(20)", timeout_s=0.2))
    assert (missing.returncode, slow.returncode, missing.stdout + slow.stdout) == (127, 124, "")
    assert missing.stderr.startswith("no-such-program: ")
    assert "0.2 s" in slow.stderr


def test_a_file_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo")
    with pytest.raises(UnavailableError, match=f"{script}: Permission denied"):
        run(Command(argv=(str(script),)))


def test_a_dry_run_runs_probes_and_prints_the_rest(tmp_path: Path) -> None:
    made = tmp_path / "made"
    out = io.StringIO()
    outputs = Executor(os.environ).dry_run(
        once(
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


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or path.read_text() != text:
        assert time.monotonic() < deadline, (
            f"waited for {text!r}, there is {path.read_text() if path.exists() else None!r}"
        )
        time.sleep(0.02)


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
        wait_for(output, "up\n")
        launcher.send_signal(signal.SIGKILL)
        wait_for(output, "up\nthe lifeline is cut\n")
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
    Executor({"PATH": "/usr/bin:/bin"}).perform(once(Command(argv=("cat",), stdin="a\udc80\n" * 50_000, mode="stream")))
    assert capfd.readouterr().out.count("\n") == 50_000
