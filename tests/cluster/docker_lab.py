"""A real Docker for the tests: the one that answers, else a dockerd of their own, and the project's image in it.

The image is built from docker/Dockerfile with build arguments alone. Its base is the Dockerfile's own where a
registry can be reached, else a stand-in (base_image.sh); torch is a CPU build, which pip finds here or at PyTorch's
index. DDPCTL_TEST_DOCKER_ROOT names a folder that is kept for the next time; else all of it goes with the session.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.driver import ROOT, wait_until

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # Debian's docker.io, before any other
DOCKER = shutil.which("docker", path=f"{PATH}:/usr/local/bin")
IMAGE = "ddpctl-test:image"
STAND_IN = "ddpctl-test:base"
TORCH = "2.13.0"
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
BUILD_S = 900
INDEX_PORT = 28731


def environ(socket: Path | None = None) -> dict[str, str]:
    """The environment of a docker client; without a socket, the one that this machine's person has."""
    kept = {name: os.environ[name] for name in ("HOME", "DOCKER_HOST") if name in os.environ}
    return kept | {"PATH": PATH, "DOCKER_BUILDKIT": "1"} | ({"DOCKER_HOST": f"unix://{socket}"} if socket else {})


def answers(env: dict[str, str]) -> bool:
    """Whether a Docker engine does."""
    argv = [str(DOCKER), "info", "--format", "{{.ServerVersion}}"]
    return DOCKER is not None and subprocess.run(argv, env=env, capture_output=True, timeout=60).returncode == 0


def missing() -> str | None:
    """Why there can be no Docker here; None: there can be."""
    if DOCKER is None:
        return "needs docker (apt install docker.io)"
    if answers(environ()):
        return None
    if os.geteuid() != 0:
        return "needs a running Docker, or root to start one"
    return None if shutil.which("dockerd", path=PATH) else "needs dockerd (apt install docker.io)"


@contextlib.contextmanager
def engine() -> Iterator[dict[str, str]]:
    """The environment of a client whose Docker answers; a dockerd that was started for it is stopped again."""
    if answers(environ()):
        yield environ()
        return
    kept = os.environ.get("DDPCTL_TEST_DOCKER_ROOT")
    folder = Path(kept or tempfile.mkdtemp(prefix="ddpctl-test-docker-"))
    env = environ(folder / "docker.sock")
    if kept and answers(env):
        yield env
        return
    with dockerd(folder) as env:
        yield env
    if not kept:
        for remaining in folder.glob("exec/netns/*"):  # of containers on the host's network
            subprocess.run(["umount", str(remaining)], env={"PATH": PATH}, check=False, timeout=10)
        shutil.rmtree(folder)


@contextlib.contextmanager
def dockerd(folder: Path, *options: str, netns: str = "") -> Iterator[dict[str, str]]:
    """A Docker daemon with all that is its own in one folder, whose path is short: it holds sockets.

    Its host's network is that of the namespace ``netns``, where one is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = environ(folder / "docker.sock")
    argv = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
    argv += [
        "setpriv",
        "--pdeathsig=TERM",
        "dockerd",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
    ]
    argv += [f"--host=unix://{folder}/docker.sock", *options]
    with (folder / "dockerd.log").open("ab") as log:
        process = subprocess.Popen(argv, env={**env, "PATH": PATH}, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or answers(env), "dockerd", timeout_s=60)
        assert process.poll() is None, (folder / "dockerd.log").read_text()[-2000:]
        yield env
    finally:
        process.terminate()
        process.wait(60)
        unmount(folder)


def unmount(folder: Path) -> None:
    """Take away what a daemon that has ended leaves mounted in its folder: the network of its host's containers."""
    for path in (folder / "exec" / "netns").glob("*"):
        subprocess.run(["umount", path], env={"PATH": PATH}, check=False, capture_output=True, timeout=20)


def docker(
    env: dict[str, str], *args: str, timeout_s: float = 120, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """What a docker command said."""
    done = subprocess.run([str(DOCKER), *args], env=env, capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, f"docker {' '.join(args)}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done


def base(env: dict[str, str]) -> str:
    """The Dockerfile's own base where it can be had, else the stand-in."""
    own = re.findall(r"^ARG BASE=(.*)$", (ROOT / "docker" / "Dockerfile").read_text(), re.M)[0]
    for path in (own, STAND_IN):
        if docker(env, "image", "inspect", path, check=False).returncode == 0:
            return str(path)
    if docker(env, "pull", "--quiet", own, check=False).returncode == 0:
        return str(own)
    script = ROOT / "tests" / "cluster" / "base_image.sh"
    subprocess.run([script, STAND_IN], env=env, check=True, capture_output=True, timeout=BUILD_S)
    return STAND_IN


@contextlib.contextmanager
def torch_index() -> Iterator[str]:
    """The address of an index that has a CPU build of torch and nothing else."""
    with tempfile.TemporaryDirectory(prefix="ddpctl-test-index-") as folder:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=20"]
        argv += [f"--extra-index-url={TORCH_CPU}", f"--dest={folder}/torch", f"torch=={TORCH}"]
        subprocess.run(argv, check=True, timeout=BUILD_S, env={**os.environ, "PATH": PATH})
        try:  # always the same address: it is a build argument, and another one would build torch's layer again
            server = ThreadingHTTPServer(("127.0.0.1", INDEX_PORT), partial(_Quiet, directory=folder))
        except OSError:
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def build(env: dict[str, str]) -> str:
    """The project's image, from its Dockerfile with nothing changed but build arguments; its reference."""
    with torch_index() as index:
        args = {"BASE": base(env), "TORCH": TORCH, "TORCHVISION": "", "TORCH_INDEX": index}
        pairs = [word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")]
        options = ("--quiet", "--network=host", "--file", str(ROOT / "docker" / "Dockerfile"), "--tag", IMAGE)
        docker(env, "build", *options, *pairs, str(ROOT), timeout_s=BUILD_S)
    return IMAGE
