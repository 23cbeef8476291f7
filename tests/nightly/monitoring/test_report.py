"""A report in a real browser (headless Chromium) that has no network: nothing is refused, nothing is missing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from tests.e2e.driver import ddpctl

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium (apt install chromium)")
PATH = os.environ["PATH"]
LAUNCH = ("launch", "--nodes", "2", "--device", "cpu", "--name", "read")


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """What the browser prints, and what its console says. As root in a network without anybody else."""
    alone = ("unshare", "--net") if os.geteuid() == 0 and shutil.which("unshare") else ()
    profile = f"--user-data-dir={page.parent}/profile"
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    command = [*alone, str(CHROMIUM), *quiet, profile, *options, page.as_uri()]
    environ = {"PATH": PATH, "HOME": str(page.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The report of a training that is long enough for a row of its history in several epochs."""
    monkeypatch.setenv("PATH", PATH)
    done = ddpctl(*LAUNCH, "--", "--epochs", "24", timeout=280)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "read.html"
    assert ddpctl("report", "read", "-o", str(path)).returncode == 0
    return path


@pytest.mark.timeout(1800)
def test_browser_shows_each_chart_of_a_report_without_a_network(report: Path) -> None:
    dom, said = browse(report, "--dump-dom")
    assert said == []
    assert re.search(r"<title>(.*?)</title>", dom)[1] == "read: succeeded"  # type: ignore[index]
    headings = re.findall(r"<h2>(.*?)</h2>", dom)
    assert headings[:5] == [
        "How the time was spent",
        "Loss",
        "Throughput, samples per second",
        "Where the time of a step goes",
        "Test accuracy",
    ]
    assert dom.count("<svg") == 6
    picture = report.with_suffix(".png")
    _, said = browse(report, f"--screenshot={picture}", "--window-size=1100,2600")
    assert said == []
    with Image.open(picture) as shown:
        colours = {colour for _, colour in shown.convert("RGB").getcolors(1 << 24)}
    phases = {"training": (0x1B, 0x78, 0x37), "import": (0x21, 0x71, 0xB5), "waiting": (0xE0, 0x82, 0x14)}
    assert {name for name, colour in phases.items() if colour in colours} == set(phases)


@pytest.mark.timeout(1800)
def test_console_shows_what_the_policy_of_a_page_forbids(tmp_path: Path) -> None:
    """So that silence means something: what the page's own policy forbids is said there."""
    page = tmp_path / "page.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><script>alert(1)</script>"
    )
    _, said = browse(page, "--dump-dom")
    assert len(said) == 1
    assert "Content Security Policy" in said[0]
