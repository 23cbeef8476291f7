"""A rehearsal on a target: the run that it is, what comes back, and which targets are refused."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.ddpctl.worlds import World
from tests.messages import assert_names
from tests.unit.ddpctl.test_rehearsal import sound

RUNS = [{"scenario": scenario, "after": after, **run} for (scenario, after), run in sound().items()]


def write_facts(site: World) -> Path:
    """Write the facts into the folder in which the node runs, and return the path of the plan that it gets."""
    folder = site.folder.parent / "box0" if site.kind == "ssh" else site.folder
    (folder / "facts.json").write_text(json.dumps(RUNS))
    return folder / "plan.json"


@pytest.mark.parametrize("kind", ["ssh", "slurm"])
def test_a_rehearsal_on_a_target_is_a_run_of_one_rank_that_is_removed(world: Callable[[str], World], kind: str) -> None:
    site = world(kind)
    plan = write_facts(site)
    settings = json.loads((site.folder / "ddpctl.yaml").read_text())
    settings["job"] |= {"secrets": ["TOKEN"], "env": {"PLAIN": "a"}}
    (site.folder / "ddpctl.yaml").write_text(json.dumps(settings))
    site.env |= {"TOKEN": "b"}
    flags = ("--target", "there", "--steps", "12", "--link", "data", "--json")
    done = site.ddpctl("rehearse", *flags, "--", "train.py", "steps=2")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["code"], {row["verdict"] for row in answer["rows"]}) == (0, {"ok"})
    settings = json.loads(plan.read_text())
    assert [settings[name] for name in ("nodes", "gpus", "ranks", "steps", "links", "max_bytes")] == [
        2, 2, 2, 12, ["data"], 200_000_000,
    ]  # fmt: skip
    assert (settings["command"], settings["env"]) == (["train.py", "steps=2"], ["PLAIN", "TOKEN"])
    assert [path.name for path in site.runs.iterdir() if not path.name.startswith(".")] == []


def test_ctrl_c_ends_a_rehearsal_on_a_target_and_its_facts_come_back(world: Callable[[str], World]) -> None:
    site = world("slurm")
    plan = write_facts(site)
    with site.start("rehearse", "--target", "there", "--json", "--", "train.py", "steps=1", "wait") as process:
        site.wait_for(lambda: [*site.runs.glob("rehearse-*/node-0/rank-0.log")] or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert {row["verdict"] for row in json.loads(stdout)["rows"]} == {"ok"}
    assert plan.exists()
    assert [path.name for path in site.runs.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", ["kubernetes", "kaggle"])
def test_a_target_that_cannot_rehearse_is_refused(world: Callable[[str], World], kind: str) -> None:
    done = world(kind).ddpctl("rehearse", "--target", "there", "--", "train.py")
    assert done.returncode == 2
    assert_names(done.stderr, "--target there", kind)
    assert ("'there'" in done.stderr) == (kind == "kubernetes")  # a shell on a machine of it is another way


def test_without_target_a_rehearsal_runs_here_and_names_the_default_target(world: Callable[[str], World]) -> None:
    site = world("ssh")
    done = site.ddpctl("rehearse", "--", "missing.py")
    assert done.returncode == 66
    assert_names(done.stderr, "--target there", "missing.py")
