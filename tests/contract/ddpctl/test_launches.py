"""A launch, attached and detached, on each target: what it runs, prints and leaves, and how it is interrupted."""

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest
from tests.contract.ddpctl.worlds import Slurm, World
from tests.messages import assert_names

from ddpwire.exits import Exit

Worlds = Callable[[str], World]
TARGETS = ("local", "ssh", "slurm", "kubernetes")


@pytest.mark.parametrize("kind", TARGETS)
def test_an_attached_launch_prints_the_ranks_lines_and_ends_with_their_code(kind: str, world: Worlds) -> None:
    site = world(kind)
    done = site.launch("steps=2", detach=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "step" in line]
    assert sorted(lines) == [f"[node{rank} rank{rank}] step {step}" for rank in (0, 1) for step in (1, 2)]
    status = site.json("status", "night")
    assert (status["state"], status["code"], [node["alive"] for node in status["node_reports"]]) == (
        "succeeded",
        0,
        [False] * 2,
    )
    assert [site.outcome(node)["cause"] for node in (0, 1)] == ["ok", "ok"]
    site.wait_for(lambda: not site.processes())  # tail looks once a second whether its shell has ended


@pytest.mark.parametrize("kind", ["local", "ssh"])
def test_nodes_with_different_numbers_of_ranks_are_right_in_every_verb(kind: str, world: Worlds) -> None:
    site = world(kind)
    script = ("train.py", "ranks=2,1", "steps=1", "wait=go")
    done = site.ddpctl("launch", "--detach", "--name", "night", "--gpus", "2,1", "--", *script)
    assert done.returncode == 0, done.stderr
    site.wait_for(lambda: site.has(0, "rank-1.log", "step 1") and site.has(1, "rank-2.log", "step 1"))
    status = site.json("status", "night")
    assert (status["gpus"], status["ranks"], status["nodes"]) == ([2, 1], [2, 1], "2")
    for rank, node in ((0, 0), (1, 0), (2, 1)):
        logs = site.ddpctl("logs", "night", "--rank", str(rank)).stdout.splitlines()
        assert logs == [f"[node{node} rank{rank}] step 1"]
    assert "[node1 rank2] step 1" in site.ddpctl("logs", "night", "--timestamps", "--node", "1").stdout
    assert site.ddpctl("logs", "night", "--rank", "3").returncode == Exit.NO_INPUT
    elsewhere = site.ddpctl("logs", "night", "--node", "1", "--rank", "0")
    assert elsewhere.returncode == Exit.NO_INPUT
    assert_names(elsewhere.stderr, "node 0 has", "node 1 has", "rank 2")
    assert "2+1" in site.ddpctl("ps").stdout
    for verb in (("explain", "night"), ("timeline", "night"), ("report", "night", "-o", "page.html")):
        assert site.ddpctl(*verb).returncode == 0
    assert "2, 1" in (site.folder / "page.html").read_text()
    site.go()
    site.wait_for(site.is_over)


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "kaggle"])
def test_a_target_whose_nodes_are_equal_refuses_different_numbers(kind: str, world: Worlds) -> None:
    done = world(kind).ddpctl("launch", "--nodes", "2", "--gpus", "2,1", "--", "train.py")
    assert done.returncode == Exit.CONFIG
    assert_names(done.stderr, kind, "gpus")


# Every cause on one target, and one on every target that has processes of its own.
FAILURES = [("local", "exit=3@1", 3, "error"), ("local", "cause=oom:137", 137, "oom"),
            ("ssh", "cause=hang:144", 144, "hang"), ("slurm", "exit=3@1", 3, "error")]  # fmt: skip


@pytest.mark.parametrize(("kind", "script", "code", "cause"), FAILURES)
def test_a_failed_run_ends_the_launch_with_its_code(
    kind: str, script: str, code: int, cause: str, world: Worlds
) -> None:
    site = world(kind)
    done = site.launch("steps=2", script, detach=False)
    assert done.returncode == code, done.stderr
    status = site.json("status", "night")
    assert (status["state"], status["code"], status["outcome"]["cause"], status["outcome"]["step"]) == (
        "failed",
        code,
        cause,
        2,
    )
    explanation = site.json("explain", "night")
    assert (explanation["fault"], explanation["rank"]) == (True, 1 if cause == "error" else None)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_dry_run_prints_what_a_launch_runs_and_does_nothing(
    kind: str, world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the launch that changes something stands in the dry run, but for numbers that it gets."""
    from ddpctl.command import Command, Output, shell_line
    from ddpctl.execution import executor

    site = world(kind)
    dry = site.ddpctl("launch", "--dry-run", "--name", "dawn", "--", "train.py", "steps=1")
    assert dry.returncode == 0, dry.stderr
    assert not (site.runs / "dawn").exists()
    assert not site.processes()
    ran: list[Command] = []
    run_all = executor.Executor._run_all

    def record(self: object, commands: tuple[Command, ...], on_interrupt: object) -> tuple[Output, ...]:
        ran.extend(command for command in commands if not command.probe)
        return run_all(self, commands, on_interrupt)

    monkeypatch.setattr(executor.Executor, "_run_all", record)
    done = site.ddpctl("launch", "--detach", "--name", "dawn", "--", "train.py", "steps=1")
    assert done.returncode == 0, done.stderr
    uid = json.loads((site.runs / "dawn/run.json").read_text())["uid"]
    printed = plain(dry.stdout, "<uid>")
    commands = [plain(shell_line(command), uid) for command in ran if "ddprun.nodectl show" not in shell_line(command)]
    assert commands
    for command in commands:
        assert command in printed, command
    site.wait_for(site.is_over)


def plain(text: str, uid: str) -> str:
    """Return the text without what differs between two launches: the uid, ports, secrets, and what a tether adds."""
    text = text.replace(uid, "UID").replace("'UID'", "UID")
    text = re.sub(r"(PET_MASTER_PORT=)(\d+|'?<port>'?)", r"\1PORT", text)
    text = re.sub(r"store\.secret: '?[\w\[\]<>]+'?|[0-9a-f]{64}|'?<secret>'?", "SECRET", text)
    return re.sub(r"uid-1|<uid>", "UID", text)


@pytest.mark.parametrize("kind", ["ssh", "slurm"])
def test_logs_follow_a_run_until_it_ends(kind: str, world: Worlds) -> None:
    site = world(kind)
    assert site.launch("steps=1", "wait=go").returncode == 0
    site.go()
    done = site.ddpctl("logs", "-f", "night", "--rank", "1")
    assert (done.returncode, "[node1 rank1] step 1" in done.stdout, "rank0" in done.stdout) == (0, True, False)


@pytest.mark.parametrize("kind", ["local", "ssh", "slurm"])
def test_a_resumed_run_uses_the_checkpoints_of_the_first(kind: str, world: Worlds) -> None:
    site = world(kind)
    site.enter("succeeded")
    done = site.ddpctl("launch", "--detach", "--resume", "night")
    assert (done.returncode, done.stdout) == (0, "night-2\n"), done.stderr
    site.wait_for(site.is_over)
    first, second = (json.loads((site.runs / run / "run.json").read_text()) for run in ("night", "night-2"))
    assert second["checkpoint_dir"] == first["checkpoint_dir"]
    refused = site.ddpctl("rm", "night")
    assert (refused.returncode, (site.runs / "night").is_dir()) == (2, True)  # the other run has its checkpoints
    assert site.ddpctl("rm", "night", "night-2").returncode == 0
    assert [path.name for path in site.runs.iterdir() if path.name[0] != "."] == []
    assert not site.node_dir(0).exists()


def test_a_run_is_not_resumed_while_another_one_trains_with_its_checkpoints(world: Worlds) -> None:
    site = world("local")
    assert site.launch("steps=1", "wait=go").returncode == 0
    site.go()
    site.wait_for(lambda: site.state() == "succeeded")
    (site.folder / "go").unlink()
    assert site.ddpctl("launch", "--detach", "--resume", "night").returncode == 0
    done = site.ddpctl("launch", "--detach", "--resume", "night")
    assert (done.returncode, done.stdout, "'night-2'" in done.stderr) == (2, "", True), done.stderr
    assert sorted(path.name for path in site.runs.glob("night*")) == ["night", "night-2"]
    site.go()


def test_stop_of_a_slurm_job_that_is_ending_waits_and_sends_no_kill(world: Worlds) -> None:
    site = world("slurm")
    assert isinstance(site, Slurm)
    site.enter("stopped")
    calls, state = site.file("calls"), site.file("jobs/7/state")
    state.write_text("COMPLETING None\n")
    calls.write_text("")

    def end_after_three_looks() -> None:
        site.wait_for(lambda: calls.read_text().count("squeue") >= 3)
        state.write_text("FAILED NonZeroExitCode\n")

    slurm = threading.Thread(target=end_after_three_looks)
    slurm.start()
    assert site.ddpctl("stop", "night").returncode == 0
    slurm.join()
    assert [line for line in calls.read_text().splitlines() if "scancel" in line and "KILL" in line] == []


@pytest.mark.parametrize("kind", ["local", "ssh", "slurm"])
def test_ranks_that_ignore_a_stop_are_killed_by_kill(kind: str, world: Worlds) -> None:
    site = world(kind)
    assert site.launch("steps=2", "wait", "save=never").returncode == 0
    site.wait_for(lambda: site.has(0, "rank-0.log", "step 2") and site.has(1, "rank-1.log", "step 2"))
    done = site.ddpctl("stop", "--kill", "night")
    assert done.returncode == 0, done.stderr
    site.wait_for(site.is_over)
    status = site.json("status", "night")
    assert (status["state"], status["code"]) == ("stopped", 137)


def test_explain_names_the_rank_that_has_not_entered_the_collective(world: Worlds) -> None:
    site = world("local")
    assert site.launch("steps=2", "hang").returncode == 0
    site.wait_for(lambda: site.has(0, "rank-0.log", "step 2") and site.has(1, "rank-1.log", "step 2"))
    explanation = site.json("explain", "night")
    assert (explanation["cause"], explanation["rank"], explanation["node"]) == ("missing", 1, 1)
    assert site.ddpctl("stop", "night").returncode == 0


def test_profile_records_again_if_the_first_recordings_do_not_overlap(world: Worlds) -> None:
    site = world("local")
    site.enter("training")
    profile = site.json("profile", "night", "--seconds", "0.5")
    assert (sorted(profile["shares"]), profile["seconds"] > 0, profile["unknown"]) == (["0", "1"], True, [])
    assert site.ddpctl("stop", "night").returncode == 0


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_timeline_and_status_have_the_fields_of_the_nodes_files(kind: str, world: Worlds) -> None:
    site = world(kind)
    site.enter("failed")
    timeline = site.json("timeline", "night")
    names = [event["event"] for event in timeline["events"]]
    assert {"node_started", "rendezvous_done", "ranks_started", "first_step", "node_ended"} <= {*names}
    status = site.json("status", "night")
    assert status["progress"]["step"] == 2
    (row,) = json.loads(site.ddpctl("ps", "--json").stdout)
    assert (row["run"], row["state"], row["code"]) == ("night", "failed", 3)
    assert site.ddpctl("report", "night", "-o", "page.html").returncode == 0
    assert (site.folder / "page.html").read_text().startswith("<!DOCTYPE html>")


# ---- Interrupted: ddpctl as a process of its own


def attached(site: World, *script: str) -> "subprocess.Popen[str]":
    launch = site.start("launch", "--name", "night", "--", "train.py", *script)
    site.wait_for(lambda: site.has(0, "rank-0.log", "step 1") and site.has(1, "rank-1.log", "step 1"))
    return launch


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_ctrl_c_lets_the_ranks_save_and_a_second_one_kills_them(kind: str, world: Worlds) -> None:
    site = world(kind)
    launch = attached(site, "steps=1", "wait", "save=go")
    launch.send_signal(signal.SIGINT)
    site.wait_for(lambda: site.has(0, "node.json", "stopping") and site.has(1, "node.json", "stopping"))
    if kind == "local":
        launch.send_signal(signal.SIGINT)
    else:
        site.go()
    output = launch.communicate(timeout=100)
    assert launch.returncode == 130, output
    site.wait_for(site.is_over)
    code = 137 if kind == "local" else 130
    assert [site.outcome(node)["code"] for node in (0, 1)] == [code, code]
    assert site.state() == "stopped"


def test_a_killed_ddpctl_ends_its_local_ranks_which_save(world: Worlds) -> None:
    site = world("local")
    launch = attached(site, "steps=1", "wait")
    launch.kill()
    launch.communicate(timeout=60)
    site.wait_for(site.is_over)
    assert [site.outcome(node)["code"] for node in (0, 1)] == [143, 143]
    assert list((site.runs / "night/checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_job_continues_without_its_ddpctl(number: signal.Signals, world: Worlds) -> None:
    site = world("slurm")
    launch = attached(site, "steps=1", "wait=go")
    launch.send_signal(number)
    launch.communicate(timeout=60)
    assert site.state() == "training"
    site.go()
    site.wait_for(site.is_over)
    assert site.state() == "succeeded"


def test_sigterm_to_an_attached_launch_stops_its_job(world: Worlds) -> None:
    site = world("slurm")
    launch = attached(site, "steps=1", "wait")
    launch.send_signal(signal.SIGTERM)
    output = launch.communicate(timeout=100)
    assert launch.returncode == 143, output
    site.wait_for(site.is_over)
    assert site.state() == "stopped"


def test_a_detached_local_run_continues_without_its_ddpctl(world: Worlds) -> None:
    site = world("local")
    launch = site.start("launch", "--detach", "--name", "night", "--", "train.py", "steps=1", "wait")
    assert launch.wait(60) == 0
    launch.communicate()
    site.wait_for(lambda: site.state() == "training")
    assert site.ddpctl("stop", "night").returncode == 0
