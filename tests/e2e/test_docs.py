"""The README and the guides: every command, and how long they are. `make docs` checks the links.

All run in this process. Launches are dry runs; all else is real, on a run named night. Commands in prose are parsed.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.e2e.driver import ROOT, SCRIPTS
from tests.in_process import ddpctl as in_process
from tests.unit.ddpctl.kaggle_answers import stand_in

from ddprun.settings import options

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("slurm/*.md")])
GUIDES = sorted(ROOT.glob("docs/*.md"))
RESULTS = [ROOT / "docs" / "results" / f"{name}.md" for name in ("benchmarks", "faults", "torchrun")]
LONGEST_GUIDE, LONGEST_README = 100, 95
COMMENT = re.compile(r"\s+#.*")


def fences(page: Path) -> list[tuple[str, str]]:
    """The code blocks of a page: language and text. Those in lists are indented."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)


def in_prose(program: str) -> list[str]:
    """Commands between backticks, and after the prompt of a console; up to a pipe, or an ellipsis."""
    commands = set()
    for page in (ROOT / "README.md", *GUIDES, *RESULTS):
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
        consoles = "\n".join(block for language, block in fences(page) if language == "console")
        commands |= set(re.findall(rf"`({program} [^`]+)`", text))
        commands |= set(re.findall(rf"^ *\$ ({program} .*)$", consoles, re.M))
    return sorted({re.sub(r"\s+(#|\||\.\.\.).*", "", line).replace("\n", " ") for line in commands})


def shown(program: str) -> list[str]:
    """The lines of the docs' code blocks that begin with that program, without their comments."""
    blocks = [block for page in PAGES for language, block in fences(page) if not language]
    lines = [COMMENT.sub("", line) for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith(f"{program} ")})


def test_the_docs_show_commands() -> None:
    assert len(shown("ddpctl")) > 8
    assert len(shown("make")) > 4


LAUNCHES = [line for line in shown("ddpctl") if line.split()[1] == "launch"]
CHECKS = ("bench", "doctor", "rehearse")
ON_BOXES = [line for line in LAUNCHES if "boxes" in line.split()]
ON_A_RUN = [line for line in LAUNCHES if "--resume" in line.split()]


@pytest.mark.parametrize("line", [line for line in LAUNCHES if line not in (*ON_BOXES, *ON_A_RUN)])
def test_a_launch_of_the_docs_is_a_dry_run(line: str, tmp_path: Path) -> None:
    arguments = shlex.split(line)[1:]
    write_scripts(tmp_path)
    if "t4s" in arguments:
        check_words_for_kaggle(arguments, tmp_path)
    elif "hpc" in arguments or "slurm" in arguments:
        check_words_for_slurm(arguments, tmp_path)
    else:
        done = in_process(arguments[0], "--dry-run", *arguments[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert " -m ddprun --grace " in done.stdout


def write_scripts(folder: Path) -> None:
    for script in ("train.py", "plain_ddp.py", "examples/plain_ddp.py"):
        (folder / script).parent.mkdir(exist_ok=True)
        (folder / script).write_text("")


@pytest.mark.parametrize("line", ON_BOXES, ids=[f"line {number}" for number in range(len(ON_BOXES))])
def test_a_launch_of_the_docs_on_hosts_that_are_not_there_is_refused(line: str, tmp_path: Path) -> None:
    """The flags of the line, and the file that the guide shows, up to the first host."""
    arguments = shlex.split(line)[1:]
    write_scripts(tmp_path)
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/hosts.md").read_text(), re.M | re.S)[:1]
    (tmp_path / "ddpctl.yaml").write_text(text.replace("@box", "@no-such-box.invalid-"))
    done = in_process(*arguments, cwd=tmp_path)
    assert done.returncode == 69, done.stderr
    hosts = set(re.findall(r"@(no-such-box\.invalid-\w+)", (tmp_path / "ddpctl.yaml").read_text()))
    assert [host for host in hosts if host not in done.stdout + done.stderr] == []
    if "--dry-run" in arguments:
        (shown_line,) = re.findall(r"^```sh\n(docker run .*?)^```$", (ROOT / "docs/hosts.md").read_text(), re.M | re.S)
        assert re.sub(r" \\\n +", " ", shown_line).rstrip("\n") in done.stdout, done.stdout


@pytest.mark.parametrize("line", [line for line in shown("ddpctl") if line.startswith("ddpctl hosts ")])
def test_hosts_lists_each_host_that_does_not_answer(line: str, tmp_path: Path) -> None:
    hosts = "[alice@no-such-box1.invalid, alice@no-such-box2.invalid]"
    (tmp_path / "ddpctl.yaml").write_text(f"targets: {{boxes: {{kind: ssh, hosts: {hosts}}}}}\n")
    done = in_process(*shlex.split(line)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [host for host in ("no-such-box1.invalid", "no-such-box2.invalid") if host not in done.stdout] == []


@pytest.mark.parametrize("line", [line for line in shown("ddpctl") if line.split()[1] in ("image", "monitor", *CHECKS)])
def test_a_command_that_needs_an_engine_a_host_or_nodes_is_a_dry_run_or_parses(line: str, tmp_path: Path) -> None:
    """Images are built and pushed as dry runs, and drawings drawn. tests/cluster and test_checks.py run the rest."""
    verb, *arguments = shlex.split(line)[1:]
    (tmp_path / "Dockerfile").write_text("")
    inner = [] if verb in CHECKS else [arguments.pop(0)]
    flags = {"build": ["--dry-run"], "push": ["--dry-run"], "config": []}.get("".join(inner), ["--help"])
    done = in_process(verb, *inner, *([] if "--show" in arguments else flags), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def check_words_for_kaggle(arguments: list[str], folder: Path) -> None:
    """A launch on Kaggle: the file that the guide shows, and a client that answers as the real one."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/kaggle.md").read_text(), re.M | re.S)
    (folder / "ddpctl.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{stand_in(folder, {'config view': 'config-view'})}:/usr/bin:/bin")
        done = in_process(arguments[0], "--dry-run", *arguments[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("kaggle kernels push --path "), done.stdout


@pytest.mark.parametrize("line", in_prose("ddpctl"))
def test_a_command_in_prose_has_a_verb_and_flags_that_are_there(line: str, tmp_path: Path) -> None:
    arguments = shlex.split(line.partition(" -- ")[0])
    done = in_process(*arguments[1:], "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ddpctl ")


def test_ddprun_has_the_flags_of_the_shown_commands() -> None:
    flags = {word.partition("=")[0] for line in [*shown("ddprun"), *in_prose("ddprun")] for word in shlex.split(line)}
    known = {flag for action in options.parser()._actions for flag in action.option_strings}
    assert {flag for flag in flags if flag.startswith("-")} <= known


def test_every_file_of_the_readme_and_of_the_guide_to_slurm_renders(tmp_path: Path) -> None:
    write_scripts(tmp_path)
    files = [text for language, text in fences(ROOT / "docs/slurm.md") if language == "yaml"]
    (readme,) = [block for language, block in fences(ROOT / "README.md") if language == "yaml"]
    assert len(files) == 2
    for text, target in (*((text, "hpc") for text in files), (readme, "hpc"), (readme, "cluster")):
        (tmp_path / "ddpctl.yaml").write_text(text)
        profile = ("--profile", "hpc") if "profiles:" in text and text != readme else ()
        arguments = () if text == readme else ("--", "train.py")
        done = in_process("render", "--target", target, *profile, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert text != readme or "2 nodes x 4 ranks of train.py" in done.stdout
        assert target != "hpc" or done.stdout.startswith("#!/usr/bin/env bash\n")


def test_no_guide_is_long() -> None:
    lines = {page: len(page.read_text().splitlines()) for page in (*GUIDES, ROOT / "README.md")}
    long = {page.name: number for page, number in lines.items() if number > LONGEST_GUIDE}
    assert (long, lines[ROOT / "README.md"] <= LONGEST_README) == ({}, True)


def check_words_for_slurm(arguments: list[str], folder: Path) -> None:
    """A launch on a cluster that is not here: its words, and the file that the guide shows, as a script."""
    text = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/slurm.md").read_text(), re.M | re.S)[0]
    (folder / "ddpctl.yaml").write_text(text)
    for name in (word for word in arguments if word.endswith(".py")):
        (folder / name).write_text("")
    done = in_process("render", *(word for word in arguments[1:] if word not in ("--detach", "--dry-run")), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/usr/bin/env bash\n")


def test_the_other_verbs_of_the_docs_work_on_a_run_that_has_ended(tmp_path: Path) -> None:
    """In the order in which a person would use them; each once, on one run."""
    assert in_process("launch", "--name", "night", "--", str(SCRIPTS / "ends.py")).returncode == 0
    # attach, exec, shell and profile need a run that continues: tests/contract. export: test_training.py, pull:
    # test_object_store.py. The others: above.
    others = ("launch", "image", "monitor", "hosts", *CHECKS, "export", "pull", "attach", "exec", "shell", "profile")
    lines = [line for line in shown("ddpctl") if line.split()[1] not in others]
    assert {line.split()[1] for line in lines} >= {"ps", "status", "logs", "stop", "rm"}
    assert len(ON_A_RUN) > 0
    for line in sorted([*ON_A_RUN, *lines], key=lambda line: line.split()[1] == "rm"):  # then it is gone
        verb, *arguments = shlex.split(line)[1:]
        done = in_process(verb, *(["--dry-run"] if verb == "launch" else []), *arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.parametrize("line", shown("make"))
def test_make_knows_its_targets(line: str) -> None:
    done = subprocess.run(["/usr/bin/make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
