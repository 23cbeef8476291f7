"""What a cluster would accept silently, or refuse late, is an error at its place in the file, before any command runs.

In refusals.txt: the file, "----", its errors, "====". An error is its line and column, and what its message names.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.kubernetes_lab import DATA
from tests.unit.ddpctl.loading import check_errors, read_cases

from ddpctl import targets
from ddpctl.errors import FileError, UsageError
from ddpctl.job import config
from ddpctl.job.launch_plan import Request


def load(tmp_path: Path, text: str, **rest: Any) -> Request:
    path = tmp_path / "ddpctl.yaml"
    path.write_text(text)
    return config.load(file=path, kinds=targets.kinds(), **rest)


@pytest.mark.parametrize(("text", "errors"), read_cases(DATA / "refusals.txt"))
def test_a_bad_file_is_refused_at_the_place_of_each_error(tmp_path: Path, text: str, errors: list[str]) -> None:
    with pytest.raises(FileError) as raised:
        load(tmp_path, text)
    check_errors(str(raised.value).replace(f"{tmp_path}/", ""), errors)


KIND = {"workload": "job"}
GOOD = "job: {name: digits, nodes: 2}\ntarget: lab\ntargets:\n  lab: {kind: kubernetes}\n"


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ({"flags": {"port": 9500}}, ["--port: 9500", "metrics_port"]),
        ({"flags": {"workload": "jbo"}}, ["--kind: 'jbo'", "auto, pytorchjob, trainjob, job"]),
        ({"flags": KIND, "target": "local"}, ["--kind", "local", "kubernetes"]),
    ],
    ids=["port", "kind", "kind of another target"],
)
def test_a_bad_flag_is_refused_by_its_name(tmp_path: Path, flags: dict[str, object], facts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, **flags)
    assert str(error.value).startswith(facts[0])
    assert all(fact in str(error.value) for fact in facts)


def test_the_kind_of_workload_is_a_flag(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, flags=KIND).options.workload == "job"


def test_only_the_chosen_target_is_checked_against_the_job(tmp_path: Path) -> None:
    text = GOOD.replace("target: lab", "target: local").replace("lab: {", "lab: {master: true, ").replace("2}", "1:2}")
    assert load(tmp_path, text).kind == "local"
    with pytest.raises(FileError) as error:
        load(tmp_path, text, target="lab")
    check_errors(str(error.value).replace(f"{tmp_path}/", ""), ["4:17 | master | 1:2"])
