"""A secret that is planted in a job is in nothing that ddpctl writes, prints or runs (docs/results/secrets.md).

The search covers whole folders, so a further file of a run is searched without a change here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from tests.contract.ddpctl.worlds import World
from tests.unit.ddpctl.kaggle_answers import stand_in

from ddpctl.command import Command, Output
from ddpctl.execution import executor

Worlds = Callable[[str], World]
TOKEN, PASSWORD = "canary7Xq2", "canary9Pw4"
HOOK = f"jsons://user:{PASSWORD}@hooks.example/{TOKEN}"  # the address of a notice
HIDDEN = (TOKEN, PASSWORD)
PLAIN = "control4Zt8"  # the value of a variable that is no secret: where it stands, the search covers
VERBS = {
    "ps": ("ps", "--json"), "status": ("status", "night", "--json"), "top": ("top", "night", "--once", "--json"),
    "explain": ("explain", "night", "--json"), "timeline": ("timeline", "night", "--json"),
    "logs": ("logs", "night"), "report": ("report", "night", "--output", "page.html"),
    "profile": ("profile", "night", "--seconds", "0.2", "--json"),
}  # fmt: skip


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Every command that ddpctl runs in the test."""
    ran: list[Command] = []
    run_all = executor.Executor._run_all

    def record(self: executor.Executor, batch: tuple[Command, ...], on_interrupt: object) -> tuple[Output, ...]:
        ran.extend(batch)
        return run_all(self, batch, on_interrupt)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.Executor, "_run_all", record)
    return ran


def plant(site: World) -> None:
    """Give the job a secret and an address, and the project a file of credentials."""
    settings = json.loads((site.folder / "ddpctl.yaml").read_text())
    settings["job"] |= {"secrets": ["TOKEN", "HOOK"], "notify": ["$HOOK"], "name": "night", "env": {"PLAIN": PLAIN}}
    (site.folder / "ddpctl.yaml").write_text(json.dumps(settings))
    site.env |= {"TOKEN": TOKEN, "HOOK": HOOK}


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the content of each file below a folder."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield str(path.relative_to(folder)), path.read_bytes().decode(errors="replace")


def process_lines() -> Iterator[tuple[str, str]]:
    """Yield each process of this machine with its command line, which every user can read."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield f"process {path.parent.name}", path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def leaks(places: Mapping[str, str], hidden: tuple[str, ...] = HIDDEN) -> list[str]:
    return [name for name, text in places.items() if any(value in text for value in hidden)]


def environment(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


# The files that have the secret while the run needs it: on Slurm until the job ends, on Kubernetes the Secret.
STORED = {"slurm": {"runs/night/secrets"}, "kubernetes": {"cluster/objects/secret.night"}}


@pytest.mark.parametrize("kind", ["local", "ssh", "slurm", "kubernetes"])
def test_a_secret_is_in_nothing_that_a_run_writes_prints_or_runs(
    kind: str, world: Worlds, commands: list[Command]
) -> None:
    site, stored = world(kind), STORED.get(kind, set())
    plant(site)
    places: dict[str, str] = {}

    def call(name: str, *arguments: str) -> None:
        done = site.ddpctl(*arguments)
        assert done.returncode == 0, (name, done.stderr)
        places[f"{name}: stdout"], places[f"{name}: stderr"] = done.stdout, done.stderr

    call("dry run", "launch", "--dry-run", "--", "train.py", "wait")
    if kind != "ssh":
        call("render", "render", "--", "train.py", "wait")
    call("launch", "launch", "--detach", "--name", "night", "--", "train.py", "steps=2", "wait=go")
    site.wait_for(lambda: site.has(0, "node.json", '"training"') and site.has(1, "node.json", '"training"'))
    site.wait_for(lambda: site.has(0, "rank-0.log", "step 2") and site.has(1, "rank-1.log", "step 2"))
    assert kind == "kubernetes" or all(value in environment(site.node_pids()[1]) for value in HIDDEN)
    places |= process_lines()
    for name, arguments in VERBS.items():
        if not (name == "profile" and kind == "kubernetes"):
            call(name, *arguments)
    during = dict(files(site.folder.parent))
    assert {*leaks(during)} == stored
    site.go()
    site.wait_for(site.is_over)
    if kind == "kubernetes":
        call("pull", "pull", "night")
    at_end = dict(files(site.folder.parent))
    if kind == "kubernetes":
        del at_end["cluster/objects/secret.night"]
    places |= {f"{name} (at the end)": text for name, text in at_end.items()}
    for number, command in enumerate(commands):
        places[f"command {number}"] = repr((command.argv, command.host, command.env, command.say))
        if not command.secret:
            places[f"stdin {number}"] = command.stdin or ""
    assert "runs/night/run.json (at the end)" in leaks(places, (PLAIN,))
    assert leaks(places) == []


def test_a_notebook_for_kaggle_has_nothing_of_the_environment(world: Worlds, commands: list[Command]) -> None:
    site = world("kaggle")
    stand_in(site.folder.parent, site.answers)  # type: ignore[attr-defined]
    site.env |= {"TOKEN": TOKEN, "HOOK": HOOK}
    (site.folder / ".env").write_text(f"TOKEN={TOKEN}\n")
    assert site.ddpctl("launch", "--detach", "--name", "night", "--", "train.py").returncode == 0
    plant(site)
    refused = site.ddpctl("launch", "--name", "dawn", "--", "train.py")
    assert refused.returncode == 78
    (site.folder / ".env").unlink()
    places = dict(files(site.folder.parent)) | {"stdout": refused.stdout, "stderr": refused.stderr}
    assert {"runs/night/kaggle/night.ipynb", "runs/night/kaggle/kernel-metadata.json"} <= places.keys()
    assert leaks(places | {str(number): repr(command) for number, command in enumerate(commands)}) == []
