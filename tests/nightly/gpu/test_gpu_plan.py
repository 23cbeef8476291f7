"""The plan of `make gpu`: it fits nine minutes, and each step's command exists."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    sys.path.insert(0, str(BENCH))  # for the module of shared functions
    try:
        spec = importlib.util.spec_from_file_location("bench_gpu", BENCH / "gpu.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["bench_gpu"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


def test_the_steps_of_part_1_fit_nine_minutes(gpu: ModuleType) -> None:
    assert sum(step.timeout_s for step in gpu.STEPS if step.part == 1) <= 540
    assert sum(step.timeout_s for step in gpu.STEPS if step.part == 2) <= 540
    assert len({step.name for step in gpu.STEPS}) == len(gpu.STEPS)


def test_the_list_of_what_only_a_gpu_reaches_names_each_step(gpu: ModuleType) -> None:
    text = (ROOT / "docs" / "decisions" / "0054-first-gpu-session.md").read_text().partition("| code | step |")[2]
    rows, _, uncovered = text.partition("Not covered:")
    cells = [line.split("|")[2] for line in rows.splitlines() if line.startswith("| ")]
    assert {name for cell in cells for name in re.findall(r"\w+", cell)} == {step.name for step in gpu.STEPS}
    assert len(re.findall(r"^\d\. ", uncovered, re.M)) <= 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_script_of_each_step_has_the_options_that_it_is_given(gpu: ModuleType, device: str) -> None:
    for step in gpu.STEPS:
        script, *arguments = step.arguments(device, Path("numbers.json"))
        if script == "-m":
            assert all((ROOT / path).exists() for path in arguments if path.endswith(".py"))
            continue
        text = (ROOT / script).read_text()
        options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        assert [option for option in options if f'"{option}"' not in text] == [], step.name
        checks = [argument for argument in arguments if not argument.startswith("--")]
        assert [check for check in checks if f"\ndef {check}(" not in text] == [], step.name


def test_a_machine_without_a_gpu_gets_78_and_an_unknown_step_is_refused(gpu: ModuleType, tmp_path: Path) -> None:
    code = "import sys, gpu; gpu.gpu_name = lambda _: ''; sys.argv[1:] = ['--out', sys.argv[1]]; gpu.main()"
    command = [sys.executable, "-E", "-S", "-c", code, str(tmp_path / "out")]  # without any installed package
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78, done.stderr
    with pytest.raises(SystemExit, match="sleep"):
        gpu.choose(1, ["sleep"])


def test_a_step_that_fails_or_hangs_does_not_end_the_run(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(name: str, code: str, timeout_s: float) -> object:
        return gpu.Step(name=name, shows=name, command=("-c", code), timeout_s=timeout_s)

    steps = (
        step("fails", "raise SystemExit('why')", 60),
        step("hangs", "import signal; signal.pause()", 10),
        step("passes", "print(7)", 60),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "CPU_FACTOR", 1.0)
    monkeypatch.setattr(gpu, "missing_packages", list)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [result["state"] for result in results] == ["failed", "timed out", "passed"]
    assert [result["last_line"] for result in results] == ["why", "", "7"]
    assert (tmp_path / "results.md").read_text().count("\n| ") == 4
