"""The wording of messages, apart from the tests' assertions: one golden file a program.

A test asserts codes, fields and values itself, and hands a sentence to the fixture ``wording``, which compares it with
the entry of that test in ``tests/golden/PROGRAM.yaml``. ``make wording`` writes the entries of the tests that it runs
again; what changed in the sentences is then read in ``git diff``.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent / "golden"
PROGRAMS = {"ddprun": "ddprun", "ddptrain": "ddptrain", "ddpwire": "ddprun"}  # a folder of tests; any other: ddpctl


def program_of(path: Path) -> str:
    """Return the program whose messages the tests in the file ``path`` see."""
    return PROGRAMS.get(path.parent.name, "ddpctl")


def read(program: str) -> dict[str, list[str]]:
    """Return a program's sentences, by test."""
    file = FOLDER / f"{program}.yaml"
    return yaml.load(file.read_text(), Loader=yaml.CSafeLoader) if file.exists() else {}


def write(program: str, sentences: Mapping[str, list[str]]) -> None:
    """Write a program's sentences, in the order of the tests' names."""
    FOLDER.mkdir(exist_ok=True)
    entries = {test: sentences[test] for test in sorted(sentences)}
    text = yaml.dump(entries, Dumper=_Dumper, width=10_000, allow_unicode=True, sort_keys=False)
    (FOLDER / f"{program}.yaml").write_text(text)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class Wording:
    """The fixture of one test: compares each text, in the order of the calls, or collects it to be written."""

    def __init__(self, test: str, expected: list[str], *, places: Mapping[str, str], update: bool) -> None:
        self.test = test
        self.seen: list[str] = []
        self._expected = expected
        self._places = places
        self._update = update

    def __call__(self, text: object, **values: object) -> None:
        """Compare ``str(text)`` with the golden file.

        The test's folder is written as TMP and the checkout as REPO. ``values`` are what differs from run to run, as
        ``port=port``: each is written as its name in braces.
        """
        seen = str(text)
        for place, name in self._places.items():
            seen = seen.replace(place, name)
        for name, value in values.items():
            seen = re.sub(rf"(?<!\w){re.escape(str(value))}(?!\w)", f"{{{name}}}", seen)
        self.seen.append(seen)
        if not self._update:
            number = len(self.seen) - 1
            assert number < len(self._expected), f"no sentence {number + 1} in tests/golden; `make wording`: {seen!r}"
            expected = self._expected[number]
            assert seen == expected, f"{seen!r}\nis not what tests/golden has:\n{expected!r}"

    def end(self) -> None:
        """Raise AssertionError if sentences are left that were not seen."""
        left = self._expected[len(self.seen) :]
        assert self._update or not left, f"not seen: {left}"
