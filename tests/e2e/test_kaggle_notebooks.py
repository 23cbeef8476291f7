"""A checked-in notebook of examples/kaggle, from top to bottom in a bare kernel: two CPU ranks, synthetic images in
the files' real format among the session's inputs.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.e2e.driver import ROOT, processes_of
from tests.e2e.kernel import close_loop
from tests.unit.ddptrain.formats import write_mnist

from ddpctl.run_status import RunStatus
from ddpctl.targets.kaggle.target import with_log
from ddpwire.run_files import read_outcome

# The client's own warnings change from version to version. A busy machine gets time: what a notebook is to take on a
# quiet one, 60 s, is printed at the end, and not asserted.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples" / "kaggle"
TIMEOUT_S = 600
MNIST = ["--recipe", "mnist-convnet", "--epochs", "2", "--batch-size", "10"]


@pytest.fixture(name="session")
def kaggle_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Kaggle session on this machine; its working folder."""
    working = tmp_path / "working"
    working.mkdir()
    write_mnist(tmp_path / "input" / "mnist-dataset")
    (tmp_path / "tmp").mkdir()
    shims = str(ROOT / "tests" / "data" / "kaggle")
    variables = {
        "KAGGLE_KERNEL_RUN_TYPE": "Batch", "DDP_KAGGLE_INPUT": str(tmp_path / "input"), "DDPCTL_DEVICE": "cpu",
        "DDP_KAGGLE_WORKING": str(working), "TMPDIR": str(tmp_path / "tmp"), "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"), "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONPATH": os.pathsep.join((shims, os.environ["PYTHONPATH"])), "OMP_NUM_THREADS": "1",
        "DDP_KAGGLE_STARTED": f"{time.time():.0f}",  # this machine may have been up for longer than a session
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(working / "runs"))
    yield working
    close_loop()


def execute(name: str, working: Path, args: list[str]) -> str:
    """Run the notebook with less to do; what it printed."""
    book = nbformat.read(EXAMPLES / name / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    at = next(number for number, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", ()))
    book.cells.insert(at + 1, nbformat.v4.new_code_cell(f"args = {args!r}"))
    NotebookClient(
        book, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(working)}}
    ).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def run_and_check(
    name: str,
    session: Path,
    args: list[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Run the notebook, and assert that its training succeeded, left its weights and has no process any more."""
    began = time.monotonic()
    text = execute(name, session, args)
    record_property("took", f"{time.monotonic() - began:.0f} s")
    status = with_log(RunStatus(run=name, state="succeeded", message="", code=0), text)
    run = session / "runs" / name
    outcome = read_outcome((run / "node-0" / "outcome.json").read_text())
    assert (outcome.code, outcome.cause) == (0, "ok")
    assert (status.state, status.message) == ("succeeded", outcome.message)
    assert list((run / "checkpoints").glob("step-*.pt"))
    assert (session / "weights.pt").stat().st_size > 10_000
    assert not processes_of(name)


def test_a_second_version_resumes_from_the_output_of_the_first(
    session: Path, record_property: Callable[[str, object], None]
) -> None:
    run_and_check("mnist", session, [*MNIST, "--epochs", "1"], record_property)
    shutil.move(session, session.parent / "input" / "ddpctl-mnist")
    session.mkdir()
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(
        "from ddpctl.notebook import launch\n"
        f"launch('ddptrain', args={MNIST!r} + ['--allow-changed-config'], name='mnist-2', resume=True)"
    )])  # fmt: skip
    NotebookClient(
        book, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(session)}}
    ).execute()
    text = "".join(output.get("text", "") for output in book.cells[0].outputs)
    path = f"{session}/runs/mnist/checkpoints/step-00000005.pt"
    assert "'mnist'" in text.splitlines()[0]
    (line,) = [line for line in text.splitlines() if path in line]
    assert re.search(r"step 6 of 10\b.*\bepoch 2\b.*\b2 epochs\b.*\b1\b", line), line
