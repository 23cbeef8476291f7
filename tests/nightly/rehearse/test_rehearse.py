"""ddpctl rehearse on the scripts beside this file: each planted fault is named, and a sound script has none."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.driver import ddpctl

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "cases.yaml").read_text())


def test_each_script_has_a_case() -> None:
    assert {path.stem for path in (HERE / "scripts").glob("*.py")} == {*CASES}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_the_faults_of_a_script_are_those_that_were_planted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if (library := case.get("needs")) and not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    (tmp_path / "train.py").write_bytes((HERE / f"scripts/{name}.py").read_bytes())
    done = ddpctl("rehearse", *case["flags"], "--json", "--", "train.py", cwd=tmp_path, timeout=900)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["id"] for row in rows if row["verdict"] == "fault"] == case["faults"], done.stdout
    assert done.returncode == bool(case["faults"])
