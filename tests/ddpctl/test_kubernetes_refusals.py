"""What a cluster would swallow, or refuse late, is an error with the line of the file, before anything is asked.

In refusals.txt: the file, "----", what ddpctl says of it, "====".
"""

from pathlib import Path

import pytest
from tests.ddpctl.kubernetes_lab import DATA

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


GOOD = "job: {name: digits, nodes: 2}\ntarget: lab\ntargets:\n  lab: {kind: kubernetes}\n"


def test_a_flag_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, overrides={"port": 9500})
    assert str(error.value) == "--port: 9500 is the port of the metrics already (metrics_port): give another"


def test_the_kind_of_workload_is_a_flag(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, workload="job").options.workload == "job"
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, workload="jbo")
    assert str(error.value) == "--kind: 'jbo' is none of auto, pytorchjob, trainjob, job"
    with pytest.raises(UsageError) as error:
        load(tmp_path, GOOD, workload="job", target="local")
    assert str(error.value) == "--kind: a target of kind local has no kinds of its own"


def test_only_the_chosen_target_judges_the_job(tmp_path: Path) -> None:
    long = GOOD.replace("target: lab", "target: local").replace("lab: {", "lab: {master: true, ").replace("2}", "1:2}")
    assert load(tmp_path, long).kind == "local"
    with pytest.raises(FileError) as error:
        load(tmp_path, long, target="lab")
    assert str(error.value).replace(f"{tmp_path}/", "") == (
        "ddpctl.yaml:4:17: master: nodes 1:2 have no Master, whose loss would end them: false, or a number of nodes"
    )
