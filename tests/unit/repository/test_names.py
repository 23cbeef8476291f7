"""Variables are named with the noun of what they hold."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
VAGUE = {"found", "one", "said", "told", "stuff"}


def test_no_variable_of_the_programs_has_a_vague_name() -> None:
    vague = []
    for path in (*ROOT.glob("cli/**/*.py"), *ROOT.glob("trainer/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if name in VAGUE:
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert vague == []
