"""A real Pushgateway has how a run ended."""

import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import forks
from tests.cluster.prometheus_lab import serve
from tests.e2e.driver import wait_until

GATEWAY = next(filter(None, map(shutil.which, ("prometheus-pushgateway", "pushgateway"))), None)
pytestmark = pytest.mark.skipif(GATEWAY is None, reason="needs a Pushgateway (apt install prometheus-pushgateway)")
PATH = os.environ["PATH"]


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            text: str = answer.read().decode()
    except OSError:
        return ""
    return text


@pytest.fixture
def gateway() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert GATEWAY is not None
    server = serve(GATEWAY, f"--web.listen-address={address}", "--persistence.file=", "--log.level=error")
    wait_until(lambda: get(f"http://{address}/metrics"), "the Pushgateway")
    yield f"http://{address}"
    server.terminate()
    server.wait(20)


def run(script: str, *options: str, environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    command = ["-m", "ddprun", "--run-id", "night", "--standalone", *options, str(path)]
    return forks.run(command, env=os.environ | {"PATH": PATH} | environ, text=True)


def test_pushgateway_has_code_and_duration_of_an_ended_run(gateway: str, tmp_path: Path) -> None:
    done = run("raise SystemExit(3)", "--pushgateway", gateway, environ={"DDP_USER": "ann"}, folder=tmp_path)
    assert done.returncode == 3
    labels = r'(?:cause="error",)?instance="",job="ddpctl",run="night"(?:,run_uid="[0-9a-f]{12}")?,user="ann"'
    metrics = dict(re.findall(rf"^(ddp_ended_\w+)\{{{labels}\}} (\S+)$", get(f"{gateway}/metrics"), re.M))
    assert (metrics["ddp_ended_exit_code"], metrics["ddp_ended_info"]) == ("3", "1")
    assert float(metrics["ddp_ended_duration_seconds"]) > 0
    assert float(metrics["ddp_ended_timestamp_seconds"]) > 1.7e9
    assert len(metrics) == 4


def test_absent_pushgateway_does_not_change_the_exit_code(tmp_path: Path) -> None:
    done = run("", environ={"DDP_PUSHGATEWAY": "http://127.0.0.1:9"}, folder=tmp_path)
    assert done.returncode == 0
    assert re.search(r"^\[node0\] .*Pushgateway http://127.0.0.1:9: .*refused", done.stderr, re.M)
