"""ddpctl rehearse: each fault that is planted into a sound script is named, and a sound script has none."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.driver import ddpctl

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "cases.yaml").read_text())


def script_of(name: str) -> str:
    plant = CASES[name].get("plant", ())
    script = (HERE / f"scripts/{'sound_epochs' if plant else name}.py").read_text()
    for lines, fault in plant:
        assert script.count(lines) == 1, lines
        script = script.replace(lines, fault)
    compile(script, name, "exec")
    return script


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_the_faults_of_a_script_are_those_that_were_planted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if (library := case.get("needs")) and not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    (tmp_path / "train.py").write_text(script_of(name))
    done = ddpctl("rehearse", *case["flags"], "--json", "--", "train.py", cwd=tmp_path, timeout=900)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["id"] for row in rows if row["verdict"] == "fault"] == case["faults"], done.stdout
    assert done.returncode == bool(case["faults"])
