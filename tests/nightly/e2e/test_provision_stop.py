"""Ctrl-C while ``ddpctl provision`` waits for machines: real Ansible, real ssh, SSH servers that never answer."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import start, wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def silent() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def with_state(folder: Path) -> dict[int, str]:
    """pid → command line of everything that was started with this state directory, this process apart."""
    processes = {}
    here = f"DDPCTL_STATE_DIR={folder}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environ, argv = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
        except OSError:
            continue
        if here in environ.split(b"\0") and argv and int(place.name) != os.getpid():
            processes[int(place.name)] = argv.replace(b"\0", b" ").decode(errors="replace")
    return processes


def test_ctrl_c_of_provision_leaves_no_process(silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Path(os.environ["DDPCTL_STATE_DIR"])
    monkeypatch.setenv("ANSIBLE_SSH_ARGS", "-F none -o BatchMode=yes")
    (tmp_path / "me.pub").write_text("ssh-ed25519 AAAA me@laptop\n")
    (tmp_path / "ddpctl.yaml").write_text(f"targets: {{boxes: {{kind: ssh, runtime: none, hosts: ['me@{silent}']}}}}\n")
    arguments = ("-f", str(tmp_path / "ddpctl.yaml"), "-t", "boxes", "--public-key", str(tmp_path / "me.pub"))
    process = start("provision", *arguments)
    try:
        wait_until(lambda: any(line.startswith("ssh ") for line in with_state(state).values()), "Ansible's ssh", 300)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        remaining = with_state(state)
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
    assert (remaining, process.returncode) == ({}, 130), output
    assert "Traceback" not in output
