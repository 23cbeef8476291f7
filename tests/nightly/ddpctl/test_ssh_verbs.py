"""The commands of the target ssh for the hosts of a run that continues."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.ssh_answers import OPTIONS, by_host
from tests.unit.ddpctl.test_ssh import ELASTIC, GONE, LOST_HOST, lost

from ddpctl.command import Output, Verb
from ddpctl.errors import UnavailableError
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.targets.ssh import scripts
from ddpctl.targets.ssh.options import SshOptions
from ddpctl.targets.ssh.preflight import report, split_shown


@pytest.mark.parametrize(("second", "goes_on"), [(lost(0), True), (GONE, False)])
def test_resuming_a_run_of_which_nothing_is_known_is_refused(second: Output, goes_on: bool, tmp_path: Path) -> None:
    class Answering:
        def perform(self, verb: Verb[Any]) -> Any:
            return perform(verb, {"": by_host(GONE, second)})[1]

    run_store.create(tmp_path, "night")
    elastic, emitted = replace(ELASTIC, folder=str(tmp_path / "night")), list[str]()
    run_store.save(elastic)
    context = AppContext(executor=Answering(), root=tmp_path, emit=emitted.append)  # type: ignore[arg-type]
    if goes_on:
        launcher.check_alone(context, elastic)
        assert ("night" in emitted[0], f"box1 (node 0) {LOST_HOST}" in emitted[0]) == (True, True)
        return
    with pytest.raises(UnavailableError, match=r"--resume: .*'night'"):
        launcher.check_alone(context, elastic)


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_what_a_host_shows_is_json_in_its_shell(shell: str, tmp_path: Path) -> None:
    node = tmp_path / ".ddpctl/runs/night/node-0"
    node.mkdir(parents=True)
    rows = "time,ddp_last_step\n1.5,4\n2.5,9\n"
    (node / "history.csv").write_text(rows)
    text = scripts.show(SshOptions(hosts=(), runtime="none"), [("night", 0)])
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([shell], input=text, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    head = rows.partition("\n")[0]
    shown = {"alive": False, "remains": False, "node": None, "outcome": None, "history": f"{head}\n{rows}"}
    assert json.loads(done.stdout) == shown
    with subprocess.Popen(["/bin/sleep", "600"], env={"DDP_RUN_DIR": str(node.parent)}) as remaining:
        done = subprocess.run([shell], input=text, env=environ, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout) == shown | {"remains": True}, "a process of the killed ddprun"
        (node / "outcome.json").write_text("{}")
        done = subprocess.run([shell], input=text, env=environ, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout) == shown | {"outcome": {}}
        remaining.kill()


def test_a_host_lists_its_containers_once(tmp_path: Path) -> None:
    """Of four nodes without an outcome, one has a container and no node.json yet, and one has left a container."""
    runs = [("day", 0), ("day", 1), ("night", 0), ("night", 1)]
    for run, node in runs:
        (tmp_path / f".ddpctl/runs/{run}/node-{node}").mkdir(parents=True)
    (tmp_path / ".ddpctl/runs/night/node-1/node.json").write_text("{}")
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@" >>"$HOME/asked"\necho ddpctl-day-1\necho ddpctl-night-1\n')
    (tmp_path / "docker").chmod(0o755)
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    text = scripts.show(OPTIONS, runs)
    done = subprocess.run(["/bin/sh"], input=text, env=environ, capture_output=True, text=True, timeout=60)
    reports = [report(line) for line in split_shown(Output(returncode=0, stdout=done.stdout), len(runs))]
    assert [(line["alive"], line["remains"]) for line in reports] == [
        (False, False), (True, False), (False, False), (False, True)
    ]  # fmt: skip
    assert (tmp_path / "asked").read_text() == "ps --all --filter label=ddpctl.run --format {{.Names}}\n"
    cut = Output(returncode=255, stdout=done.stdout[: len(done.stdout) // 2])
    answers = [report(line) for line in split_shown(cut, len(runs))]
    assert (answers[0], answers[-1]) == (reports[0], None), "what came before the host was lost counts"
