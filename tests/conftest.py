"""What every test gets: a clean environment, so that no unit test can reach a real cluster or a person's runs."""

import gc
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from tests.forks import PACKAGES

GOLDEN = Path(__file__).parent / "golden"
KEPT = ("HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "CI", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")


def pytest_configure() -> None:
    """Handle signals as in a fresh shell, however the tests were started, in every process that a test starts.

    ``nohup`` and ``&`` in a script make SIGHUP, SIGINT and SIGQUIT ignored, which children inherit; a signal that has a
    handler is reset to its default in them. So ``nohup make test`` still survives the end of its terminal. SIGPIPE
    needs no reset: Python ignores it always, and subprocess restores it in a child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in this process interrupt it
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            os.environ["PYTEST_IGNORES"] = f"{os.environ.get('PYTEST_IGNORES', '')} {number.name}"
    for name in os.environ.get("PYTEST_IGNORES", "").split():  # xdist's workers are children, too
        signal.signal(signal.Signals[name], lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Threads of OpenMP that wait for each other do not spin: tests run side by side, and spinning takes their cores.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the tests import out of all garbage collections, each of which would take 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the imports be collected at the end: nanobind reports what is left of triton as leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No PATH but the interpreter's, no variable of a launcher, runs under the test's own folder."""
    for name in list(os.environ):
        if name not in KEPT and not name.startswith("PYTEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PACKAGES))


@pytest.fixture(autouse=True, scope="module")
def collect_garbage() -> Iterator[None]:
    """Report what a file of tests has left open at its own end: not in a later file, in which memory is collected."""
    yield
    gc.collect()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--update-golden, as `make golden` gives it."""
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden again")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Compare a whole screen or spec with tests/golden/TEST.txt: ``snapshot(text)``. ``make golden`` writes the files.

    The test's folder is written as TMP and the checkout as REPO. ``values`` are what differs from run to run, as
    ``port=port``: each is written as its name in braces.
    """

    def compare(text: str, name: str = "", **values: object) -> None:
        for place, word in ((str(tmp_path), "TMP"), (str(request.config.rootpath), "REPO")):
            text = text.replace(place, word)
        for word, value in values.items():
            text = re.sub(rf"(?<!\w){re.escape(str(value))}(?!\w)", f"{{{word}}}", text)
        file = re.sub(r"[^\w.-]+", "-", f"{request.node.name}{name and '-' + name}".removeprefix("test_")).strip("-")
        path = GOLDEN / f"{file}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"no {path}: `make golden` writes it"
        assert text == path.read_text()

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a test has recorded under ``took``: seconds that are asked for, and not asserted on a busy machine."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "took":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
