"""``ddpctl monitor up`` starts Prometheus with a real docker compose, sees a run, and removes it again.

A registry cannot be reached everywhere, so the image is made of this machine's own Prometheus; Grafana, of which there
is no binary to make one, stays out.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster import docker_lab
from tests.cluster.prometheus_lab import MISSING
from tests.e2e.driver import PACED, ddpctl, node_log, wait_until

pytestmark = [pytest.mark.skipif(MISSING != "", reason=MISSING), pytest.mark.timeout(1800)]
PATH = os.environ["PATH"]
IMAGE = "ddpctl-test-monitor:prometheus"
DOCKERFILE = 'FROM scratch\nCOPY . /\nENTRYPOINT ["/usr/bin/prometheus"]\n'


@pytest.fixture
def boxed(docker_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment in which ddpctl finds a Docker, and in it the image."""
    for name, value in docker_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("PROMETHEUS_IMAGE", IMAGE)
    composes = ((str(docker_lab.DOCKER), "compose"), ("docker-compose",))
    if not any(
        shutil.which(argv[0]) and not subprocess.run((*argv, "version"), capture_output=True).returncode
        for argv in composes
    ):
        pytest.skip("needs docker compose (apt install docker-compose)")
    program = shutil.which("prometheus")
    assert program
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=30).stdout
    context = tmp_path / "image"
    for path in {program, *re.findall(r"(/\S+) \(0x", linked)}:
        (context / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, context / path[1:])
    (context / "Dockerfile").write_text(DOCKERFILE)
    docker_lab.docker(docker_env, "build", "--quiet", "--tag", IMAGE, str(context))
    yield
    down = ddpctl("monitor", "down", timeout=300)
    assert down.returncode == 0, down.stderr
    docker_lab.docker(docker_env, "image", "rm", "--force", IMAGE, check=False)


def test_monitor_up_sees_a_run_and_down_removes_the_containers(boxed: None, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    up = ("monitor", "up", "--no-grafana", "--port", port, "--interval", "1")
    done = ddpctl(*up, timeout=300)
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, f"Prometheus  http://127.0.0.1:{port}"), done.stderr
    again = ddpctl(*up, "--limit", "skew=2", timeout=300)
    assert again.returncode == 0, again.stderr
    ddpctl("launch", "-d", "--name", "night", "--nodes", "2", "--", str(PACED), "--epochs", "2000", "--device", "cpu")
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "night")), "the second epoch", 120)
        told = {}

        def seen() -> bool:
            told.update(json.loads(ddpctl("monitor", "status", "--json").stdout))
            return [node["up"] for node in told["nodes"]] == [True, True]

        wait_until(seen, "both nodes in the box", 60)
        assert told["prometheus"] == f"http://127.0.0.1:{port}"
        assert [(node["run"], node["node"]) for node in told["nodes"]] == [("night", "0"), ("night", "1")]
    finally:
        ddpctl("stop", "night", "--kill")
    wait_until(lambda: "nodes       none: " in ddpctl("monitor", "status").stdout, "the run to be forgotten", 60)
    assert ddpctl("monitor", "down", timeout=300).returncode == 0
    assert ddpctl("monitor", "status").returncode == 69
    data = tmp_path / "runs" / ".monitoring" / "data" / "prometheus"
    assert list(data.iterdir())  # what was seen is kept
    assert ddpctl("monitor", "down", "--forget", timeout=300).returncode == 0
    assert not data.exists()
