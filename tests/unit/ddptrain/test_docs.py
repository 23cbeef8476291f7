"""The commands of ddptrain that the docs show are ones that it takes."""

import re
import shlex
from pathlib import Path

import pytest

from ddptrain.config import parse_options
from ddptrain.recipes import recipe_names

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def shown() -> list[str]:
    """Lines of code blocks, and code in tables and prose, that begin with ddptrain; without comments."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
        lines = [*(line for block in blocks for line in block.splitlines()), *re.findall(r"`(ddptrain [^`]*)`", text)]
        found |= {re.sub(r"\s+#.*", "", line) for line in lines if re.match(r"ddptrain( +-| *$| +#)", line)}
    return sorted(found)


@pytest.mark.parametrize("line", [line for line in shown() if "--help" not in line])
def test_a_shown_command_is_taken(line: str) -> None:
    parse_options([word.replace("FILE.yaml", recipe_names()[0]) for word in shlex.split(line)[1:]], {})


def test_the_docs_show_commands_and_every_recipe() -> None:
    assert len(shown()) > 5
    table = (ROOT / "docs" / "training.md").read_text()
    assert [name for name in recipe_names() if f"`{name}`" not in table] == []


def test_the_docs_say_what_a_recipe_must_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("options: {}\n")
    with pytest.raises(SystemExit):
        parse_options([f"--recipe={tmp_path}/own.yaml"], {})
    refused = re.findall(r"--([a-z-]+)(?=[,;])", capsys.readouterr().err)
    page = (ROOT / "docs" / "training.md").read_text()
    told = re.findall(r"Four options have no default: ([^.]*)\.", page)[0]
    assert sorted(re.findall(r"`([a-z-]+)`", told)) == sorted(refused) == ["batch-size", "epochs", "lr", "model"]
