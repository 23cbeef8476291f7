"""What a cluster would swallow, or refuse late, is an error with the line of the file, before anything is asked.

In refusals.txt: the file, "----", what ddpctl says of it, "====".
"""

from pathlib import Path

import pytest
from tests.unit.ddpctl.kubernetes_lab import DATA
from tests.wording import Wording

from ddpctl import config, targets
from ddpctl.errors import FileError, UsageError

CASES = [case.strip("\n").split("\n----\n") for case in (DATA / "refusals.txt").read_text().split("\n====\n")]


def load(tmp_path: Path, text: str, **rest: object) -> config.Settings:
    path = tmp_path / "ddpctl.yaml"
    path.write_text(text)
    given = {"profile": None, "target": None, "overrides": {}, **rest}
    return config.load(file=path, kinds=targets.kinds(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "said"), CASES, ids=[said.splitlines()[0][:60] for _, said in CASES])
def test_the_file_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FileError) as error:
        load(tmp_path, text)
    assert str(error.value).replace(f"{tmp_path}/", "") == said


KIND = {"--kind": ("workload", "job")}
GOOD = "job: {name: digits, nodes: 2}\ntarget: lab\ntargets:\n  lab: {kind: kubernetes}\n"


@pytest.mark.parametrize(
    "flags",
    [
        {"overrides": {"port": 9500}},
        {"target_flags": {"--kind": ("workload", "jbo")}},
        {"target_flags": KIND, "target": "local"},
    ],
    ids=["port", "kind", "kind of another target"],
)
def test_a_flag_is_refused_by_its_name(tmp_path: Path, flags: dict[str, object], wording: Wording) -> None:
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, **flags)
    wording(error.value)


def test_the_kind_of_workload_is_a_flag(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, target_flags=KIND).options.workload == "job"


def test_only_the_chosen_target_judges_the_job(tmp_path: Path, wording: Wording) -> None:
    long = GOOD.replace("target: lab", "target: local").replace("lab: {", "lab: {master: true, ").replace("2}", "1:2}")
    assert load(tmp_path, long).kind == "local"
    with pytest.raises(FileError) as error:
        load(tmp_path, long, target="lab")
    assert str(error.value).startswith(f"{tmp_path}/ddpctl.yaml:4:17: master: ")
    wording(error.value)
